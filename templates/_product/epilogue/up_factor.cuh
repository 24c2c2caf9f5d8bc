// What most gates multiply by, and its derivative.
struct UpFactor {
  __device__ __forceinline__ static float function(float x) { return x; }
  __device__ __forceinline__ static float slope(float) { return 1.f; }
};

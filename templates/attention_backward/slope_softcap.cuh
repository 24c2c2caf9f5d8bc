// The slope of softcap tanh(x / softcap), but for a factor that the gradients get in the end: 1 - tanh^2.
constexpr uint32_t kHidden = 0xdd800000;  // the tanh of what does not attend: -2^60, whose square is finite
__device__ __forceinline__ float steepen(float weight, float tanh) { return weight - weight * tanh * tanh; }

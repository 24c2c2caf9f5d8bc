  // The block of scales of up for the columns of the product from n on: half as many of the gate and of up, which
  // begins anywhere in its block. What 64 columns of a half have in common is one block, as 64 divide a half.
  __device__ __forceinline__ static int up_block(const Parameters& p, int n) {
    return (p.n / 2 + min(n, p.n - 1) / 2) / 128;
  }


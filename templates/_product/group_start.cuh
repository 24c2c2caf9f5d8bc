    int largest = 0;
    for (int group = first; group < last; ++group) largest = max(largest, ends[group + 1]);
    CUTE_UNROLL
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, largest, apart);
      if (lane >= apart) largest = max(largest, other);
    }
    int start = __shfl_up_sync(~0u, largest, 1);
    if (lane == 0) start = 0;

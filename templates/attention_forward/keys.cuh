// Before the main kernel: a block for each row of a mask of keys.
extern "C" __global__ void __launch_bounds__({{ keys_threads }})
    {{ spec.name }}_keys(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  find_keys(p, blockIdx.x);
}

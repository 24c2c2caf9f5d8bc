// Programmatic dependent launch: waits until the previous grid has ended and its writes are visible, and lets
// the next grid start. What comes before this call may run under the previous grid.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// The gradients of scores leave as ds lies in shared memory, when all have written it: one thread of the warpgroup
// that has a box stores it, and waits until it is read before anybody writes there again.
__device__ __forceinline__ bool stores_ds(const Consumer& c) {
  return threadIdx.x % 128 == 0 && {{ "c.consumer" if shares_rows else "c.part" }} == 0;
}
__device__ __forceinline__ void store_ds(const Consumer& c, Step step) {
  if (!stores_ds(c)) return;
{% if operation.lengths == "packed" %}
  const int batch = c.work.sequence.number;
{% else %}
  const int batch = c.work.sequence.batch;
{% endif %}
  cute::SM90_TMA_STORE_4D::copy(&c.p.ds_map, c.own_ds(step), c.column, step.row, step.head, batch);
  cute::tma_store_arrive();
}
__device__ __forceinline__ void await_stored_ds(const Consumer& c) {
  if (stores_ds(c)) cute::tma_store_wait<0>();
}

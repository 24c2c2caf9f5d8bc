// ---- Producer: one thread keeps q, k and v coming -------------------------------------------------
// A piece of work, known before its turn: what its list says is read under the last loads of the piece before.
struct Listed {
  int4 header;  // how many tiles, how many whole, the first mask, which tile of rows
  int list, all_head, first;  // the list's number; the head's, of all batches; the tile that is walked first

  // Takes the next piece if there is one, in the order in which they are worked off: by sections of heads whose k and v
  // fit L2 together; within one the longest lists of all its heads, then the next: lists lie in this order.
  __device__ __forceinline__ bool take(const Parameters& p, Tiles& tiles) {
    int index;
    if (!tiles.next(p, index)) return false;
    const int section = index / (p.section * p.q_tiles), offset = index - section * p.section * p.q_tiles;
    const int heads = min(p.section, p.all_heads - section * p.section);
    all_head = section * p.section + offset % heads;
    const int batch = all_head / p.heads;
    list = batch * p.list_batch + (all_head - batch * p.heads) * p.list_head + offset / heads;
    header = p.lists[list];
    first = p.listed[int64_t(list) * p.list_tiles];
    return true;
  }
};

// Loads tile `n` of the k or v of a batch and head.
__device__ __forceinline__ void load(const cute::TmaDescriptor& map, FullBarrier (&full)[kStages],
                                     EmptyBarrier (&empty)[kStages], uint8_t (&tiles)[kStages][kStageBytes], Position at,
                                     int n, int batch, int head) {
  empty[at.stage].wait(at.phase);
  full[at.stage].arrive_and_expect_tx(kStageBytes);
  const auto columns = Sequence{batch}.columns_at<kKvTile>(n * kKvTile);
  Tile<kKvTile>::load(map, full[at.stage], kEvictLast, tiles[at.stage], columns, head);
}

{% if values_apart %}
__device__ __forceinline__ void load_values(const Parameters& p, SharedStorage& shared, Position at, int n, int batch,
                                            int head) {
  shared.v_empty[at.stage].wait(at.phase);
  shared.v_full[at.stage].arrive_and_expect_tx(Values::kBytes);
  Values::load(p.v_map, shared.v_full[at.stage], shared.v[at.stage], Sequence{batch}, n * kKvTile, head);
}

{% endif %}
__device__ __forceinline__ void produce(const Parameters& p, SharedStorage& shared) {
  Tiles tiles;
  Position position{0, 1};  // a fresh barrier counts as having passed the phase before: no wait at first
  Ring<kQStages> q{0, 1};
  Listed next;
  bool more = next.take(p, tiles), ahead = false;  // whether the first k is on its way already
  while (more) {
    const Listed now = next;
    const int batch = now.all_head / p.heads, q_head = now.all_head - batch * p.heads, head = q_head / p.sharing;
    const int count = now.header.x;
    const int* listed = p.listed + int64_t(now.list) * p.list_tiles;
    // In the order of use: the scores of a tile are multiplied before the output of the tile before.
    if (count > 0 && !ahead)
      load(p.k_map, shared.k_full, shared.k_empty, shared.k, position, now.first, batch, head);
    CUTE_NO_UNROLL
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int row = now.header.w * kQTile + consumer * kWgmmaM;
      FullBarrier& full = shared.q_full[q.stage][consumer];
      shared.q_empty[q.stage][consumer].wait(q.phase);
      shared.work[q.stage][consumer] = {1, row, q_head, {batch}, 0, count, now.header.y, now.list, now.header.z};
      full.arrive_and_expect_tx(kQBytes);  // releases the work too
      Tile<kWgmmaM>::load(p.q_map, full, kEvictFirst, shared.q[q.stage][consumer],
                          Sequence{batch}.rows_at<kWgmmaM>(row), q_head);
    }
    if (count == 0) more = next.take(p, tiles);
    ahead = false;
    int of_v = now.first;
    CUTE_NO_UNROLL
    for (int n = 1; n <= count; ++n) {
      const Position before = position;
      position.advance();
      if (n == max(1, count - 1)) more = next.take(p, tiles);  // not earlier: others may come to it first
      const int of_k = n < count ? listed[n] : 0;
      if (n < count) {
        load(p.k_map, shared.k_full, shared.k_empty, shared.k, position, of_k, batch, head);
      } else if (more && next.header.x > 0) {  // the next piece's first
        const int next_batch = next.all_head / p.heads, next_head = next.all_head % p.heads / p.sharing;
        load(p.k_map, shared.k_full, shared.k_empty, shared.k, position, next.first, next_batch, next_head);
        ahead = true;
      }
{% if values_apart %}
      load_values(p, shared, before, of_v, batch, head);
{% else %}
      load(p.v_map, shared.v_full, shared.v_empty, shared.v, before, of_v, batch, head);
{% endif %}
      of_v = of_k;
    }
    q.advance();
  }
  CUTE_NO_UNROLL
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    shared.q_empty[q.stage][consumer].wait(q.phase);
    shared.work[q.stage][consumer].more = 0;
    shared.q_full[q.stage][consumer].arrive();
  }
}

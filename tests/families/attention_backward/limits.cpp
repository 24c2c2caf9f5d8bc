// Runs what an emitted attention backward kernel reckons with lengths on the host, built so that a sum beyond 32
// bits ends the program. The including file holds those parts, as they were rendered.
#include <cstdio>

static int sum;  // of all that is reckoned: the compiler must not leave it out

static void use(BoxCoord coord) {
#ifdef PACKED
  sum ^= coord.row ^ coord.first;
#else
  sum ^= coord.row;
#endif
}

static void reckon(const Parameters& p, const Work& work, int n) {
  const int m = walk(p, work, n), tile = work.first_tile + (p.sharing - 1) * p.q_tiles + m, row = m * kQTile;
  sum ^= tile * kParts + work.part ^ 2 * tile;  // of the sums of dq, of the statistics
  use(work.sequence.rows_at<kQTile>(row));
#ifdef ORDERED
  sum ^= tiles_before(p, work, row);
#endif
  for (int column = work.column; column < work.column + kKvTile; column += kWgmmaM)
    for (threadIdx.x = 0; threadIdx.x < 128; threadIdx.x += 127) {
      float scores[kScores] = {};
      if (PARTIAL(p, work.sequence, row, column)) MASK(scores, p, work.sequence, row, column);
      sum ^= scores[0] != 0;
    }
}

int main() {
  Parameters p{};
  int total_q, total_k, left, right;
  if (std::scanf("%d %d %d %d %d %d %d %d", &total_q, &total_k, &p.all_kv_heads, &p.sharing, &p.q_tiles, &p.kv_tiles, &left, &right) != 8)
    return 2;
  p.section = p.all_kv_heads;
  SET_BOUNDS(p, left, right, 1);
#ifdef PACKED
  int cu_q[2] = {0, total_q}, cu_k[2] = {0, total_k};
  p.cu_seqlens_q = cu_q, p.cu_seqlens_k = cu_k, p.batch = 1, p.total_q = total_q, p.total_k = total_k;
#else
  p.heads = p.all_kv_heads * p.sharing, p.seq_q = total_q, p.seq_k = total_k;
#endif
  const int numbers = p.all_kv_heads * p.sharing * p.q_tiles, blocks = p.all_kv_heads * p.kv_tiles * kParts;
  for (int number : {0, numbers - 1}) sum ^= q_tile_coord(p, number).row + kQTile - 1;
  for (int leftward : {0, 1}) {
#ifdef ORDERED
    p.leftward = leftward;
#endif
    for (int index : {0, blocks / 2, blocks - 1}) {
      const Work work = locate(p, index);
      if (work.column >= work.sequence.columns(p)) continue;
      use(work.sequence.columns_at<kKvRows>(work.column));
      for (int n : {work.begin, work.end - 1})
        if (work.begin < work.end) reckon(p, work, n);
    }
    sum ^= leftward;
  }
  volatile int used = sum;
  return used * 0;
}

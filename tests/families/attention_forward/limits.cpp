// Runs what an emitted attention kernel reckons with lengths on the host, built so that a sum beyond 32 bits ends
// the program. The including file holds those parts, as they were rendered.
#include <cstdio>
#include <vector>

struct Visit {
  int n;
  bool masked, hides;
};
static std::vector<Visit> visits;
static int skips;

static int sum;  // of all that is reckoned: the compiler must not leave it out

static void use(BoxCoord coord) {
#ifdef PACKED
  sum ^= coord.row ^ coord.first;
#else
  sum ^= coord.row;
#endif
}

int main() {
  Parameters p{};
  int total_q, total_k, left, right;
  if (std::scanf("%d %d %d %d %d %d %d", &total_q, &total_k, &p.all_heads, &p.q_tiles, &p.section, &left, &right) != 7) return 2;
  SET_BOUNDS(p, left, right, 1);
  p.tiles = p.all_heads * p.q_tiles;
#ifdef PACKED
  int cu_q[2] = {0, total_q}, cu_k[2] = {0, total_k};
  p.cu_seqlens_q = cu_q, p.cu_seqlens_k = cu_k, p.batch = 1, p.total_q = total_q, p.total_k = total_k;
#else
  p.heads = p.all_heads, p.seq_q = total_q, p.seq_k = total_k;
#endif
  for (int index : {0, p.tiles / 2, p.tiles - 1}) {
    const Work tile = locate(p, index);
    if (tile.row < 0 || tile.row >= tile.sequence.rows(p)) continue;
    if (tile.end < tile.begin || (!kBoundsRight && tile.end == 0)) return 1;
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int row = tile.row + consumer * kWgmmaM;
      const Work work = share(p, tile, row);
      use(work.sequence.rows_at<kWgmmaM>(row));
      for (int n : {work.end - 1, work.begin}) {
        if (n < work.begin || n >= work.end) continue;
        use(work.sequence.columns_at<kKvTile>(n * kKvTile));
        for (int own : {0, 55}) {
          float scores[kScores] = {};
          MASK(scores, p, work.sequence.columns(p), row + DIAGONAL(work.sequence) + own, n * kKvTile + 6);
          sum ^= scores[0] != 0;
        }
      }
    }
  }
  volatile int used = sum;
  return used * 0;
}

// Runs the parts of an emitted attention kernel that decide which columns a row attends to, on the host,
// over random problems. The including file holds those parts, as they were rendered, and:
//   visit(work, row)  the consumer's loop over kv tiles: calls Steps::first and Steps::next
#include "_attention/ranges.h"
#include <set>
#include <vector>
#ifdef KEYS
#include "_attention/keys.h"
#endif

struct Visit {
  int n;
  bool masked, hides;  // by bounds, by a mask of keys
};
static std::vector<Visit> visits;
static int skips;

// One sequence of one head: `rows` by `columns`, what is attended to by how often it was computed.
struct Seen {
  int rows, columns;
  std::vector<unsigned char> times;
  std::vector<unsigned char> stored;
  const unsigned char* shown = nullptr;  // of a mask of keys
  Seen(int rows, int columns) : rows(rows), columns(columns), times(size_t(rows) * columns), stored(rows) {}
};

static int take(const Parameters& p, const Work& tile, Seen& seen) {
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    const int row = tile.row + consumer * kWgmmaM;
    const Work work = share(p, tile, row);
    visits.clear();
    skips = 0;
    visit(work);
    const int loaded = tile.end > tile.begin ? tile.end - tile.begin : 0, taken = int(visits.size());
    REQUIRE(taken + skips == loaded, "of %d tiles that are loaded, %d are taken and %d left out", loaded, taken, skips);
    for (int i = 0; i < int(visits.size()); ++i) {
      REQUIRE(visits[i].n == tile.end - 1 - skips - i, "tile %d is taken as number %d", visits[i].n, i);
      if (!visits[i].masked) {  // every column, whichever thread has it
        const int first = visits[i].n * kKvTile;
        REQUIRE(row >= seen.rows || first + kKvTile <= seen.columns, "row %d attends to columns from %d of %d", row, first, seen.columns);
        for (int r = row; r < row + kWgmmaM && r < seen.rows; ++r) {
          unsigned char* times = &seen.times[size_t(r) * seen.columns + first];
          if (!visits[i].hides) count<kKvTile>(times);
          else for (int c = 0; c < kKvTile; ++c) times[c] += seen.shown[first + c] != 0;
        }
        continue;
      }
      for (int thread = 0; thread < 128; ++thread) {
        const int own = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
        float scores[kScores] = {};
        MASK(scores, p, work.sequence.columns(p), row + DIAGONAL(work.sequence) + own, visits[i].n * kKvTile + column);
        for (int j = 0; j < kScores; ++j) {
          const int r = row + own + j / 2 % 2 * 8, c = visits[i].n * kKvTile + column + j / 4 * 8 + j % 2;
          if (scores[j] != 0 || r >= seen.rows) continue;
          REQUIRE(c < seen.columns, "row %d attends to column %d of %d", r, c, seen.columns);
          if (visits[i].hides && seen.shown[c] == 0) continue;
          ++seen.times[size_t(r) * seen.columns + c];
        }
      }
    }
    for (int r = row; r < row + kWgmmaM && r < seen.rows; ++r) ++seen.stored[r];
  }
  return 0;
}

static int verify(const Seen& seen, int left, int right) {
  for (int r = 0; r < seen.rows; ++r) REQUIRE(seen.stored[r] == 1, "row %d of %d is stored %d times", r, seen.rows, seen.stored[r]);
  return verify_times(seen.times, seen.rows, seen.columns, left, right, seen.shown);
}

// Every tile is some block's, once.
static int verify_dealing(const Parameters& p) {
  std::vector<int> dealt(p.tiles);
  gridDim.x = std::min(p.tiles, 1 + random_below(140));
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    Tiles tiles;
    for (int index; tiles.next(p, index);) {
      REQUIRE(index >= 0 && index < p.tiles, "tile %d of %d", index, p.tiles);
      ++dealt[index];
    }
  }
  for (int index = 0; index < p.tiles; ++index) REQUIRE(dealt[index] == 1, "tile %d is dealt %d times", index, dealt[index]);
  return 0;
}

static int random_bound() {
  switch (random_below(4)) {
    case 0: return 1 << 30;
    case 1: return 0;
    default: return random_below(500) - 150;
  }
}

#ifdef PACKED
// The rows of the tensor that a box reaches are those of its sequence, and where they are expected.
template <int kRows> static int verify_box(BoxCoord coord, int row, int first, int count) {
  for (int j = 0; j < kRows; ++j) {
    const bool inside = coord.row >= 0 && coord.row + j < kRows;
    REQUIRE(inside == (row + j < count), "row %d of %d", row + j, count);
    REQUIRE(!inside || coord.first >= 0, "coordinate %d", coord.first);
    const int at = coord.row + j + (coord.first - kBack);
    REQUIRE(!inside || at == first + row + j, "row %d is read at %d", row + j, at);
  }
  return 0;
}

// Whatever offsets hold, what is read and stored lies in the tensors.
static int wild_problem() {
  const int batch = 1 + random_below(9), heads = 1 + random_below(4);
  Parameters p{};
  p.total_q = 1 + random_below(1000), p.total_k = 1 + random_below(1000), p.batch = batch;
  std::vector<int> cu_q(batch + 1), cu_k(batch + 1);
  for (int b = 0; b <= batch; ++b) cu_q[b] = wild_offset(p.total_q), cu_k[b] = wild_offset(p.total_k);
  p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_k.data();
  SET_BOUNDS(p, random_bound(), random_bound(), random_below(2));
  p.q_tiles = p.total_q / kQTile + batch, p.all_heads = heads, p.tiles = p.q_tiles * heads;
  p.section = 1 + random_below(heads);
#ifdef KEYS
  const Mask mask(p, batch, heads, p.total_k);
#endif
  for (int index = 0; index < p.tiles; ++index) {
    const Work work = locate(p, index);
    const Sequence& of = work.sequence;
    if (work.row < 0 || work.row >= of.rows(p)) continue;
    REQUIRE(of.first_row >= 0 && of.first_row <= p.total_q - of.rows(p), "rows %d and %d more of %d", of.first_row, of.rows(p), p.total_q);
    REQUIRE(work.begin >= 0, "kv tile %d", work.begin);
    for (int row = work.row; row < work.row + kQTile; row += kWgmmaM)
      if (verify_inside<kWgmmaM>(of.rows_at<kWgmmaM>(row), p.total_q)) return 1;
    for (int n = work.begin; n < work.end; ++n)
      if (verify_inside<kKvTile>(of.columns_at<kKvTile>(n * kKvTile), p.total_k)) return 1;
  }
  return 0;
}

static int problem() {
  if (wild_problem()) return 1;
  const int batch = 1 + random_below(9), heads = 1 + random_below(4);
  std::vector<int> cu_q{0}, cu_k{0};
  for (int b = 0; b < batch; ++b) {
    cu_q.push_back(cu_q.back() + (random_below(4) ? random_below(400) : 0));
    cu_k.push_back(cu_k.back() + (random_below(4) ? random_below(400) : 0));
  }
  Parameters p{};
  p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_k.data(), p.batch = batch;
  p.total_q = cu_q.back() + random_below(70), p.total_k = cu_k.back() + random_below(70);
  const int given_left = random_bound(), given_right = random_bound();
  SET_BOUNDS(p, given_left, given_right, random_below(2));
  p.q_tiles = p.total_q / kQTile + batch, p.all_heads = heads, p.tiles = p.q_tiles * heads;
  p.section = 1 + random_below(heads);
  std::vector<Seen> seen;
  for (int head = 0; head < heads; ++head)
    for (int b = 0; b < batch; ++b) seen.emplace_back(cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]);
#ifdef KEYS
  const Mask shown(p, batch, heads, 400);  // no sequence is longer
  for (int i = 0; i < heads * batch; ++i) seen[i].shown = shown.row(i % batch, i / batch);
#endif
  if (verify_dealing(p)) return 1;
  for (int index = 0; index < p.tiles; ++index) {
    const Work work = locate(p, index);
    if (work.row < 0 || work.row >= work.sequence.rows(p)) continue;
    int b = 0;
    while (cu_q[b + 1] <= work.sequence.first_row) ++b;  // those before are empty, or over
    REQUIRE(work.sequence.first_row == cu_q[b] && work.sequence.first_column == cu_k[b], "sequence %d", b);
    REQUIRE(work.sequence.rows(p) == cu_q[b + 1] - cu_q[b] && work.sequence.columns(p) == cu_k[b + 1] - cu_k[b], "sequence %d", b);
    if (take(p, work, seen[work.head * batch + b])) return 1;
    for (int row = work.row; row < work.row + kQTile; row += kWgmmaM)
      if (verify_box<kWgmmaM>(work.sequence.rows_at<kWgmmaM>(row), row, cu_q[b], cu_q[b + 1] - cu_q[b])) return 1;
    for (int n = work.begin; n < work.end; ++n)
      if (verify_box<kKvTile>(work.sequence.columns_at<kKvTile>(n * kKvTile), n * kKvTile, cu_k[b], cu_k[b + 1] - cu_k[b])) return 1;
  }
  for (int head = 0; head < heads; ++head)
    for (int b = 0; b < batch; ++b) {
      const Seen& one = seen[head * batch + b];
      const int diagonal = kBoundsRight && BOTTOM_RIGHT(p) ? one.columns - one.rows : 0;
      if (verify(one, kBoundsLeft ? given_left - diagonal : 1 << 30, kBoundsRight ? given_right + diagonal : 1 << 30)) return 1;
    }
  return 0;
}
#else
static int problem() {
  Parameters p{};
  const int batch = 1 + random_below(3);
  p.heads = 1 + random_below(4), p.seq_q = 1 + random_below(600), p.seq_k = 1 + random_below(600);
  const int given_left = random_bound(), given_right = random_bound();
  SET_BOUNDS(p, given_left, given_right, 0);
  p.q_tiles = (p.seq_q + kQTile - 1) / kQTile, p.all_heads = p.heads * batch, p.tiles = p.q_tiles * p.all_heads;
  p.section = 1 + random_below(p.all_heads);
  std::vector<Seen> seen(p.all_heads, Seen(p.seq_q, p.seq_k));
#ifdef KEYS
  const Mask shown(p, batch, p.heads, p.seq_k);
  for (int i = 0; i < p.all_heads; ++i) seen[i].shown = shown.row(i / p.heads, i % p.heads);
#endif
  if (verify_dealing(p)) return 1;
  for (int index = 0; index < p.tiles; ++index) {
    const Work work = locate(p, index);
    REQUIRE(work.row >= 0 && work.row < p.seq_q, "row %d of %d", work.row, p.seq_q);
    if (take(p, work, seen[work.sequence.batch * p.heads + work.head])) return 1;
  }
  for (const Seen& one : seen)
    if (verify(one, kBoundsLeft ? given_left : 1 << 30, kBoundsRight ? given_right : 1 << 30)) return 1;
  return 0;
}
#endif

int main() {
  srand(1);
  for (int i = 0; i < PROBLEMS; ++i)
    if (problem()) return 1;
  return 0;
}

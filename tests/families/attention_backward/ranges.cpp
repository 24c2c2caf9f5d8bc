// Runs the parts of an emitted attention backward kernel that decide which rows a block works on, on the
// host, over random problems. The including file holds those parts, as they were rendered.
#include "_attention/ranges.h"
#include <vector>
#ifdef KEYS
#include "_attention/keys.h"
#endif

// The work of a block, without what a mask of keys hides all of.
static Work work_of(const Parameters& p, int index) {
  Work work = locate(p, index);
#ifdef KEYS
  trim(p, work);
#endif
  return work;
}

// Whether the block asks a mask of keys about its tile.
static bool asks(const Work& work) {
#if defined(TELLS)
  return work.hides;
#elif defined(KEYS)
  return (void)work, true;
#else
  return (void)work, false;
#endif
}

// One sequence of one query head: how often each pair was computed, each row of dq and each column of dk
// and dv stored. What follows the last packed sequence is a sequence whose pairs do not count.
struct Seen {
  int rows, columns;
  bool counts;
  std::vector<unsigned char> times, row_stored, column_stored;
  const unsigned char* shown = nullptr;  // of a mask of keys
  Seen(int rows, int columns, bool counts)
      : rows(rows), columns(columns), counts(counts), times(counts ? size_t(rows) * columns : 0), row_stored(rows), column_stored(columns) {}
};

// The rows of the tensor that a box reaches are those of its sequence, and where they are expected.
template <int kRows> static int verify_box(BoxCoord coord, int row, int first, int count) {
#ifdef PACKED
  for (int j = 0; j < kRows; ++j) {
    const bool inside = coord.row >= 0 && coord.row + j < kRows;
    REQUIRE(inside == (row + j < count), "row %d of %d", row + j, count);
    REQUIRE(!inside || coord.first >= 0, "coordinate %d", coord.first);
    const int at = coord.row + j + (coord.first - kBack);
    REQUIRE(!inside || at == first + row + j, "row %d is read at %d", row + j, at);
  }
#else
  REQUIRE(coord.row == row, "row %d", row);
#endif
  return 0;
}

// The pairs of one q tile and the kv tile of `work`, masked as the consumers do.
static int take(const Parameters& p, const Work& work, int m, Seen& seen) {
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    const int column = work.column + (kKvRows == kKvTile ? consumer : work.part) * kWgmmaM;
    const int row = m * kQTile + (kQRows == kQTile ? 0 : consumer * kQRows);
    if (!PARTIAL(p, work.sequence, row, column)) {  // every pair, whichever thread has it
      const int rows = min(kQRows, seen.rows - row);
      REQUIRE(rows <= 0 || column + kWgmmaM <= seen.columns, "rows from %d attend to columns from %d of %d", row, column, seen.columns);
      for (int r = row; r < row + rows; ++r) {
        unsigned char* times = &seen.times[size_t(r) * seen.columns + column];
        if (!asks(work)) count<kWgmmaM>(times);
        else for (int c = 0; c < kWgmmaM; ++c) times[c] += seen.shown[column + c] != 0;
      }
      continue;
    }
    for (threadIdx.x = consumer * 128; threadIdx.x < (consumer + 1) * 128; ++threadIdx.x) {
      float scores[kScores] = {};
      MASK(scores, p, work.sequence, row, column);
      for (int j = 0; j < kScores; ++j) {
        const int r = row + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2;
        const int c = column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + j / 2 % 2 * 8;
        if (scores[j] != 0 || r >= seen.rows) continue;
        REQUIRE(c < seen.columns, "row %d attends to column %d of %d", r, c, seen.columns);
        if (asks(work) && seen.shown[c] == 0) continue;
        ++seen.times[size_t(r) * seen.columns + c];
      }
    }
  }
  return 0;
}

static int verify(const Seen& seen, int left, int right) {
  for (int r = 0; r < seen.rows; ++r) REQUIRE(seen.row_stored[r] == 1, "row %d of %d is stored %d times", r, seen.rows, seen.row_stored[r]);
  for (int c = 0; c < seen.columns; ++c)
    REQUIRE(seen.column_stored[c] == 1, "column %d of %d is stored %d times", c, seen.columns, seen.column_stored[c]);
  return seen.counts ? verify_times(seen.times, seen.rows, seen.columns, left, right, seen.shown) : 0;
}

static int random_bound() {
  switch (random_below(4)) {
    case 0: return 1 << 30;
    case 1: return 0;
    default: return random_below(500) - 150;
  }
}

#ifdef PACKED
// Whatever offsets hold, what is read and stored lies in the tensors and their storage, and each turn comes.
static int wild_problem() {
  Parameters p{};
  const int batch = 1 + random_below(6), kv_heads = 1 + random_below(3);
  p.total_q = 1 + random_below(1000), p.total_k = 1 + random_below(1000), p.batch = batch, p.sharing = 1 + random_below(3);
  std::vector<int> cu_q(batch + 1), cu_k(batch + 1);
  for (int b = 0; b <= batch; ++b) cu_q[b] = wild_offset(p.total_q), cu_k[b] = wild_offset(p.total_k);
  p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_k.data();
  SET_BOUNDS(p, random_bound(), random_bound(), random_below(2));
  p.q_tiles = p.total_q / kQTile + batch + 1, p.kv_tiles = p.total_k / kKvTile + batch + 1, p.all_kv_heads = kv_heads;
  p.section = 1 + random_below(kv_heads);
#ifdef ORDERED
  p.leftward = random_below(2);
#endif
#ifdef KEYS
  const Mask shown(p, batch, kv_heads * p.sharing, p.total_k);
#endif
  const int numbers = p.q_tiles * kv_heads * p.sharing;
  for (int number = 0; number < numbers; ++number) {
    const TileCoord at = q_tile_coord(p, number);
    const int first = at.sequence.first_row, rows = at.sequence.rows(p);
    REQUIRE(at.row >= 0, "row %d", at.row);
    REQUIRE(at.row >= rows || (first >= 0 && first <= p.total_q - rows), "rows %d and %d more of %d", first, rows, p.total_q);
  }
  std::vector<int> added(numbers * kParts);
  for (int block = 0; block < p.kv_tiles * p.all_kv_heads * kParts * kCluster; ++block) {
    blockIdx.x = block;
    const Work work = work_of(p, block / kCluster);
    const Sequence& of = work.sequence;
    const int columns = of.columns(p);
    REQUIRE(work.column >= 0, "column %d", work.column);
    if (work.column >= columns) continue;
    REQUIRE(of.first_column >= 0 && of.first_column <= p.total_k - columns, "columns %d and %d more of %d", of.first_column, columns, p.total_k);
    for (int column = work.column; column < work.column + kKvTile; column += kKvRows)
      if (verify_inside<kKvRows>(of.columns_at<kKvRows>(column), p.total_k)) return 1;
    for (int i = rank(); i < p.sharing; i += kCluster)
      for (int n = work.begin; n < work.end; ++n) {
        const int m = walk(p, work, n), number = work.first_tile + i * p.q_tiles + m;
        REQUIRE(number >= 0 && number < numbers, "q tile %d of %d", number, numbers);
        if (verify_inside<kQTile>(of.rows_at<kQTile>(m * kQTile), p.total_q)) return 1;
        const int before = added[number * kParts + work.part]++;
#ifdef ORDERED
        REQUIRE(tiles_before(p, work, m * kQTile) <= before, "turn %d, which %d blocks came before", tiles_before(p, work, m * kQTile), before);
#endif
        (void)before;
      }
  }
  return 0;
}
#endif

static int problem() {
#ifdef PACKED
  if (wild_problem()) return 1;
#endif
  Parameters p{};
  const int kv_heads = 1 + random_below(3), sharing = 1 + random_below(3), heads = kv_heads * sharing;
#if defined(KEYS) && defined(ORDERED)
  // No call has a window without columns: a last tile that is cut short might count in turns, and add nothing.
  const int given_left = random_bound(), given_right = std::max(random_bound(), -given_left);
#else
  const int given_left = random_bound(), given_right = random_bound();
#endif
  std::vector<Seen> seen;  // by batch and query head; packed: by query head and sequence
  p.sharing = sharing;
#ifdef PACKED
  const int batch = 1 + random_below(6), sequences = batch + 1;
  std::vector<int> cu_q{0}, cu_k{0};
  for (int b = 0; b < batch; ++b) {
    cu_q.push_back(cu_q.back() + (random_below(4) ? random_below(400) : 0));
    cu_k.push_back(cu_k.back() + (random_below(4) ? random_below(400) : 0));
  }
  p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_k.data(), p.batch = batch;
  p.total_q = cu_q.back() + random_below(2) * random_below(300), p.total_k = cu_k.back() + random_below(2) * random_below(300);
  SET_BOUNDS(p, given_left, given_right, random_below(2));
  p.q_tiles = p.total_q / kQTile + batch + 1, p.kv_tiles = p.total_k / kKvTile + batch + 1, p.all_kv_heads = kv_heads;
  const int all_heads = heads;
  for (int head = 0; head < heads; ++head)
    for (int b = 0; b < sequences; ++b)
      seen.emplace_back((b == batch ? p.total_q : cu_q[b + 1]) - cu_q[b], (b == batch ? p.total_k : cu_k[b + 1]) - cu_k[b], b < batch);
  const auto of = [&](const Sequence& sequence, int column_too, int head) {
    for (int b = 0; b < sequences; ++b)  // an empty one begins where the next does
      if (sequence.first_row == cu_q[b] && (b == batch || sequence.rows(p) == cu_q[b + 1] - cu_q[b]) &&
          (!column_too || (sequence.first_column == cu_k[b] && (b == batch || sequence.columns(p) == cu_k[b + 1] - cu_k[b]))) &&
          (column_too || sequence.rows(p) > 0))
        return head * sequences + b;
    return -1;
  };
#else
  const int batch = 1 + random_below(3);
  p.heads = heads, p.seq_q = 1 + random_below(600), p.seq_k = 1 + random_below(600);
  SET_BOUNDS(p, given_left, given_right, 0);
  p.q_tiles = (p.seq_q + kQTile - 1) / kQTile, p.kv_tiles = (p.seq_k + kKvTile - 1) / kKvTile, p.all_kv_heads = kv_heads * batch;
  const int all_heads = heads * batch;
  for (int head = 0; head < all_heads; ++head) seen.emplace_back(p.seq_q, p.seq_k, true);
  const auto of = [&](const Sequence& sequence, int, int head) { return sequence.batch * heads + head; };
#endif
  p.section = 1 + random_below(p.all_kv_heads);
#ifdef ORDERED
  p.leftward = random_below(2);
#endif
#ifdef KEYS
#ifdef PACKED
  const Mask shown(p, batch, heads, 400);  // no sequence is longer; what follows the last has no row
  for (int i = 0; i < heads * sequences; ++i) seen[i].shown = shown.row(min(i % sequences, batch - 1), i / sequences);
#else
  const Mask shown(p, batch, heads, p.seq_k);
  for (int i = 0; i < all_heads; ++i) seen[i].shown = shown.row(i / heads, i % heads);
#endif
#endif

  struct Storage { int which, row; };
  std::vector<Storage> storage;  // what the q tile with a number is
  for (int number = 0; number < p.q_tiles * all_heads; ++number) {
    const TileCoord at = q_tile_coord(p, number);
    storage.push_back({-1, 0});
    REQUIRE(at.row >= 0, "row %d", at.row);
    if (at.row >= at.sequence.rows(p)) continue;
    const int which = of(at.sequence, 0, at.head);
    REQUIRE(which >= 0, "q tile %d is in no sequence", number);
    storage.back() = {which, at.row};
    for (int r = at.row; r < at.row + kQTile && r < seen[which].rows; ++r) ++seen[which].row_stored[r];
  }

  std::vector<int> added(p.q_tiles * all_heads * kParts);  // kv tiles, to a q tile's dq
  for (int block = 0; block < p.kv_tiles * p.all_kv_heads * kParts * kCluster; ++block) {
    blockIdx.x = block;
#ifdef ORDERED
    const int index = block / kCluster;  // the ticket
#else
    const int index = number(p, shared);
#endif
    const Work work = work_of(p, index);
    REQUIRE(work.column >= 0 && work.part >= 0 && work.part < kParts, "column %d, part %d", work.column, work.part);
    if (work.column >= work.sequence.columns(p)) continue;
    REQUIRE(rank() < sharing || work.begin >= work.end, "a block without query heads has %d tiles", work.end - work.begin);
    for (int i = rank(); i < sharing; i += kCluster) {
      const int which = of(work.sequence, 1, work.head * sharing + i);
      REQUIRE(which >= 0, "kv tile %d is in no sequence", index);
      Seen& one = seen[which];
      for (int c = work.column; work.part == 0 && c < work.column + kKvTile && c < one.columns; ++c) ++one.column_stored[c];
      REQUIRE(one.counts || work.begin >= work.end, "%d tiles follow the last sequence", work.end - work.begin);
#ifdef PACKED
      const int first_row = work.sequence.first_row, first_column = work.sequence.first_column;
#else
      const int first_row = 0, first_column = 0;
#endif
      for (int column = work.column; column < work.column + kKvTile; column += kKvRows)
        if (verify_box<kKvRows>(work.sequence.columns_at<kKvRows>(column), column, first_column, one.columns)) return 1;
      for (int column = work.column; column < work.column + kKvTile; column += kWgmmaM)
        if (verify_box<kWgmmaM>(work.sequence.columns_at<kWgmmaM>(column), column, first_column, one.columns)) return 1;
      for (int n = work.begin; n < work.end; ++n) {
        const int m = walk(p, work, n), number = work.first_tile + i * p.q_tiles + m;
        REQUIRE(m >= work.begin && m < work.end, "q tile %d of [%d, %d)", m, work.begin, work.end);
        REQUIRE(storage[number].which == which && storage[number].row == m * kQTile, "q tile %d is not number %d", m, number);
        if (verify_box<kQTile>(work.sequence.rows_at<kQTile>(m * kQTile), m * kQTile, first_row, one.rows)) return 1;
        // Blocks that share columns compute the same scores.
        if ((kKvRows < kKvTile || work.part == 0) && take(p, work, m, one)) return 1;
        // One block after the other, each finds that its turn has come: none waits for a later one.
        const int before = added[number * kParts + work.part]++;
#ifdef ORDERED
        REQUIRE(tiles_before(p, work, m * kQTile) == before, "turn %d after %d blocks", tiles_before(p, work, m * kQTile), before);
#endif
        (void)before;
      }
    }
  }
  for (size_t which = 0; which < seen.size(); ++which) {
    const Seen& one = seen[which];
#ifdef PACKED
    const int diagonal = kBoundsRight && BOTTOM_RIGHT(p) ? one.columns - one.rows : 0;
#else
    const int diagonal = 0;
#endif
    // Each column's gradients are stored for its kv head: counted for each of its query heads.
    if (verify(one, kBoundsLeft ? given_left - diagonal : 1 << 30, kBoundsRight ? given_right + diagonal : 1 << 30)) return 1;
  }
  return 0;
}

int main() {
  srand(1);
  for (int i = 0; i < PROBLEMS; ++i)
    if (problem()) return 1;
  return 0;
}

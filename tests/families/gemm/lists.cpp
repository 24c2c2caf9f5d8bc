// Makes lists of a mask as an emitted block-sparse GEMM does, on the threads of the host, and walks the tiles of all
// clusters: each tile comes up once, with the blocks of its own list in their order. The including file has those parts,
// and kListThreads, kSparse and kClusterSize.
#include <pthread.h>

static pthread_barrier_t together, warps[kListThreads / 32];
static uint32_t votes[kListThreads / 32];

void __syncthreads() { pthread_barrier_wait(&together); }

uint32_t __ballot_sync(uint32_t, bool vote) {
  const int warp = threadIdx.x / 32;
  pthread_barrier_wait(&warps[warp]);
  if (threadIdx.x % 32 == 0) votes[warp] = 0;
  pthread_barrier_wait(&warps[warp]);
  if (vote) __atomic_fetch_or(&votes[warp], 1u << threadIdx.x % 32, __ATOMIC_SEQ_CST);
  pthread_barrier_wait(&warps[warp]);
  return votes[warp];
}

int __reduce_add_sync(uint32_t, int value) {
  static int sums[kListThreads / 32];
  const int warp = threadIdx.x / 32;
  pthread_barrier_wait(&warps[warp]);
  if (threadIdx.x % 32 == 0) sums[warp] = 0;
  pthread_barrier_wait(&warps[warp]);
  __atomic_fetch_add(&sums[warp], value, __ATOMIC_SEQ_CST);
  pthread_barrier_wait(&warps[warp]);
  return sums[warp];
}

int __shfl_sync(uint32_t, int value, int lane) {
  static int values[kListThreads];
  const int warp = threadIdx.x / 32;
  pthread_barrier_wait(&warps[warp]);
  values[threadIdx.x] = value;
  pthread_barrier_wait(&warps[warp]);
  return values[32 * warp + lane];
}

int __clz(uint32_t bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
int __popc(uint32_t bits) { return __builtin_popcount(bits); }

static Parameters given;

static void* thread(void* number) {
  threadIdx.x = int(reinterpret_cast<intptr_t>(number));
  make_lists(given);
  return nullptr;
}

// Whether all tiles of a cluster read the same rows of A: so says a tile of a block-sparse D.
template <class Tile>
static auto shares(const Tile& tile, int) -> decltype(tile.shares_a) { return tile.shares_a; }
template <class Tile>
static bool shares(const Tile&, long) { return false; }

static const char* broken(int clusters, const int* lengths) {
  const Parameters& p = given;
  const int blocks_m = (p.m + 127) / 128, blocks_n = (p.n + 127) / 128, blocks_k = (p.k + 127) / 128;
  const int rows = kSparse == 'b' ? blocks_n : blocks_m, columns = kSparse == 'd' ? blocks_n : blocks_k;
  gridDim.x = clusters * kClusterSize;
  const ListedTiles tiles(p);
  std::set<std::pair<int, int>> seen;
  int zeros = 0, apart = 0;
  for (int index = 0; index < tiles.count(); ++index) {
    const TileCoord leader = tiles.at(index, 0);
    apart += kSparse == 'd' && !shares(leader, 0) && leader.k_tiles > 1;
    for (int rank = 0; rank < kClusterSize; ++rank) {
      const TileCoord at = tiles.at(index, rank);
      if (at.k_tiles != leader.k_tiles || shares(at, 0) != shares(leader, 0)) return "a cluster's tiles differ in length";
      if (shares(at, 0) && at.m != leader.m) return "tiles of several rows share A";
      if (kSparse == 'd' && at.m / 128 == rows && kClusterSize > 1) continue;  // it fills a cluster up
      if (at.m < 0 || at.n < 0 || at.m % kTileM || at.n % kTileN || !seen.insert({at.m, at.n}).second)
        return "a tile comes up twice, or begins within one";
      KTiles k_tiles(p, at);
      const int row = (kSparse == 'b' ? at.n : at.m) / 128;
      if (row >= rows) return "a tile lies beyond D";
      std::vector<int> expected;
      if (kSparse == 'd') {
        if (at.n / 128 >= columns) return "a tile lies beyond D";
        const bool counts = p.mask[row * p.mask_row + at.n / 128 * p.mask_column];
        if (counts && zeros > 0) return "a tile that is computed comes behind one that is not";
        zeros += !counts;
        for (int i = 0; counts && i < (p.k + kTileK - 1) / kTileK; ++i) expected.push_back(i);
      } else {
        for (int column = 0; column < columns; ++column)
          for (int i = 0; p.mask[row * p.mask_row + column * p.mask_column] && i < 128 / kTileK; ++i)
            expected.push_back(column * (128 / kTileK) + i);
      }
      if (expected.empty()) {
        if (at.k_tiles != 1 || int64_t(k_tiles.next(0, 1)) * kTileK < p.k) return "what does not count is multiplied";
        continue;
      }
      if (at.k_tiles != int(expected.size())) return "a list has another length";
      for (int i = 0; i < at.k_tiles; ++i)
        if (k_tiles.next(i, at.k_tiles) != expected[i]) return "a k tile is another one";
    }
  }
  for (int row = 1; kSparse != 'd' && row < rows; ++row)
    if (lengths[2 * row + 1] > lengths[2 * row - 1]) return "a longer list comes behind a shorter one";
  if (kClusterSize > 1 && 2 * apart > rows + 1) return "blocks of a row were not put together";
  const int tiles_m = (p.m + kTileM - 1) / kTileM, tiles_n = (p.n + kTileN - 1) / kTileN;
  return int(seen.size()) >= tiles_m * tiles_n ? nullptr : "a tile is left out";
}

int main() {
  pthread_barrier_init(&together, nullptr, kListThreads);
  for (auto& one : warps) pthread_barrier_init(&one, nullptr, 32);
  for (int clusters, percent, transposed; std::scanf("%d %d %d %d %d %d", &given.m, &given.n, &given.k, &clusters,
                                                    &percent, &transposed) == 6;) {
    const int blocks_m = (given.m + 127) / 128, blocks_n = (given.n + 127) / 128, blocks_k = (given.k + 127) / 128;
    const int rows = kSparse == 'b' ? blocks_n : blocks_m, columns = kSparse == 'd' ? blocks_n : blocks_k;
    std::vector<uint8_t> mask(rows * columns);
    for (auto& one : mask) one = std::rand() % 100 < percent;
    std::vector<int> lists(3 * rows, -1), entries(rows * (columns + 1) + 2 * kClusterSize, -1);
    given.mask = mask.data();
    given.mask_row = transposed ? 1 : columns;
    given.mask_column = transposed ? rows : 1;
    set(given, lists.data(), entries.data());
    std::vector<pthread_t> threads(kListThreads);
    for (intptr_t i = 0; i < kListThreads; ++i)
      pthread_create(&threads[i], nullptr, thread, reinterpret_cast<void*>(i));
    for (auto& one : threads) pthread_join(one, nullptr);
    if (const char* why = broken(clusters, lists.data())) {
      std::printf("%dx%dx%d, %d %%, %d clusters: %s\n", given.m, given.n, given.k, percent, clusters, why);
      return 1;
    }
  }
  return 0;
}

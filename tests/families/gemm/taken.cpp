// Runs the producers and consumers of an emitted block-sparse GEMM that takes tiles from a counter, on lists of random
// masks, twice each: each tile is stored once, with the products of its own list in their order, blocks of zeros are
// stored by one thread where there is one, and nobody is left waiting.
#define main lists_of_masks
#include "gemm/lists.cpp"
#undef main

static std::vector<SharedStorage> memories;  // of all CTAs
static std::map<std::pair<int, int>, int> stored;  // rows of wgmma of a tile, and how often they were
static std::map<std::pair<int, int>, int> zeros;

static char** cluster_memory(int rank) {
  static thread_local char* found;
  const int cta = blockIdx.x / kClusterSize * kClusterSize + rank;
  found = reinterpret_cast<char*>(&memories[cta]);
  return &found;
}

void cute::SM90_TMA_STORE_2D::copy(const TmaDescriptor*, const uint8_t*, int column, int row) {
  const std::unique_lock<std::mutex> lock(emulated::mutex);
  ++zeros[{row, column}];
}

static std::vector<int> expected(int m, int n) {  // the k of each product of a tile
  const Parameters& p = given;
  std::vector<int> found;
  const int row = (kSparse == 'b' ? n : m) / 128;
  if (kSparse == 'd') {
    const bool counts = p.mask[row * p.mask_row + n / 128 * p.mask_column];
    for (int k = 0; counts && k < p.k; k += kTileK) found.push_back(k);
  } else {
    for (int block = 0; block < (p.k + 127) / 128; ++block)
      for (int k = 0; p.mask[row * p.mask_row + block * p.mask_column] && k < 128; k += kTileK)
        found.push_back(block * 128 + k);
  }
  return found;
}

void Store::operator()(const Parameters& p, Value (&)[kFragments][2][2], const TileCoord& at, int chunk) {
  if (chunk > 0 || at.m >= p.m) return;  // rows past the last are not loaded
  const int m = at.m / kTileM * kTileM;
  std::vector<int> wanted = expected(m, at.n), found;
  for (const Product& one : multiplied) {
    if (one.a.first != m || one.b.first != at.n) emulated::fail("a tile has the products of another");
    if (one.a.k != one.b.k) emulated::fail("A and B are at different k");
    found.push_back(one.a.k);
  }
  if (wanted.empty() ? found.size() != 1 || found[0] < p.k : found != wanted) emulated::fail("a list has other products");
  const std::unique_lock<std::mutex> lock(emulated::mutex);
  ++stored[{at.m, at.n}];
}

static void run_kernel(int clusters) {
  const int ctas = clusters * kClusterSize;
  gridDim.x = ctas;
  memories = std::vector<SharedStorage>(ctas);
  std::memset(static_cast<void*>(memories.data()), 0, ctas * sizeof(SharedStorage));
  for (auto& one : memories)
    for (int stage = 0; stage < kStages; ++stage) {
      one.full[stage].init(1);
      one.empty[stage].init(kSharing * kClusterSize);
#ifdef MAILED
      one.mails[stage].init();
#endif
    }
  std::vector<std::function<void(SharedStorage&, int, int)>> roles = {
      [=](SharedStorage& shared, int rank, int cluster) { produce(given, shared, rank, cluster, clusters); }};
  for (int i = 0; i < kConsumers; ++i)
    roles.push_back([=](SharedStorage& shared, int rank, int cluster) {
      consume(given, shared, i, rank, cluster, clusters);
    });
#ifdef ZEROING
  roles.push_back([](SharedStorage& shared, int, int) { store_zeros(given, shared.zeros); });
#endif
  emulated::alive = ctas * roles.size();
  std::vector<std::thread> threads;
  for (int cta = 0; cta < ctas; ++cta)
    for (const auto& role : roles)
      threads.emplace_back([&role, cta] {
        blockIdx.x = cta;
        own = &memories[cta];
        own_memory = reinterpret_cast<char*>(own);
        role(*own, cta % kClusterSize, cta / kClusterSize);
        emulated::ends();
      });
  for (auto& one : threads) one.join();
  for (const auto& one : memories)
    for (const auto& state : one.named)
      if (state.waits || state.arrivals) emulated::fail("an arrival stays pending");
}

static void check() {
  const Parameters& p = given;
  constexpr int kBoxColumns = kZeroColumns, kPartRows = kBlocks * kWgmmaM;
  for (int m = 0; m < p.m; m += kPartRows)
    for (int n = 0; n < p.n; n += kTileN) {
      bool counts = true;
#ifdef ZEROING
      counts = !expected(m / kTileM * kTileM, n).empty();
      for (int i = 0; i < kPartRows; i += 8)
        for (int j = 0; j < kTileN; j += kBoxColumns)
          if (zeros[{m + i, n + j}] != !counts) emulated::fail("a box of zeros is not stored once, or where D is computed");
#endif
      if (stored[{m, n}] != counts) emulated::fail("a tile is not stored once");
    }
}

int main() {
  pthread_barrier_init(&together, nullptr, kListThreads);
  for (auto& one : warps) pthread_barrier_init(&one, nullptr, 32);
  for (int clusters, percent; std::scanf("%d %d %d %d %d", &given.m, &given.n, &given.k, &clusters, &percent) == 5;) {
    const int blocks_m = (given.m + 127) / 128, blocks_n = (given.n + 127) / 128, blocks_k = (given.k + 127) / 128;
    const int rows = kSparse == 'b' ? blocks_n : blocks_m, columns = kSparse == 'd' ? blocks_n : blocks_k;
    std::vector<uint8_t> mask(rows * columns);
    std::vector<int> lists(3 * rows, -1), entries(rows * (columns + 1) + 2 * kClusterSize, -1);
    int counter[2] = {-1, -1};  // what a workspace has before the first launch
    given.mask = mask.data();
    given.mask_row = columns;
    given.mask_column = 1;
    given.counter = counter;
    given.a_map.rows = kTileM;
    given.b_map.rows = kTileN;
    given.a_tail_map.rows = given.a_tail_rows = ((given.m - 1) % kTileM + 8 * kClusterN) / (8 * kClusterN) * (8 * kClusterN);
    set(given, lists.data(), entries.data());
    for (int replay = 0; replay < 2; ++replay) {  // a graph's, with another mask and the same workspaces
      for (auto& one : mask) one = std::rand() % 100 < percent;
      std::vector<pthread_t> threads(kListThreads);
      for (intptr_t i = 0; i < kListThreads; ++i)
        pthread_create(&threads[i], nullptr, thread, reinterpret_cast<void*>(i));
      for (auto& one : threads) pthread_join(one, nullptr);
      if (counter[0] != 0) emulated::fail("the counter does not begin at 0");
      if (const char* why = broken(clusters, lists.data())) emulated::fail(why);
      stored.clear();
      zeros.clear();
      run_kernel(clusters);
      check();
    }
  }
  return 0;
}

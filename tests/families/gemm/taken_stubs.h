// What a stage of the pipeline was loaded with, and what a consumer has multiplied.
struct Loaded { int first, k; };

struct SharedStorage {
  Loaded a[kStages], b[kStages];
  uint8_t staging[1];
  alignas(16) uint8_t zeros[1024];
  cutlass::arch::NamedBarrier::State named[8];
  TileSlot tiles[kStages];
#ifdef MAILED
  Mail mails[kStages];
#endif
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
};
static thread_local SharedStorage* own;
cutlass::arch::NamedBarrier::State& cutlass::arch::NamedBarrier::of(int number) { return own->named[number]; }

// A load of a whole tile by each CTA, or of a slice for all.
template <int kRowsOfTile, int kSharedBy> struct Operand {
  static constexpr int kRows = kRowsOfTile, kBytes = kRowsOfTile * kTileK * 2;
  static constexpr uint16_t kReceivers = (1 << kClusterSize) - 1;

  static void load(const cute::TmaDescriptor& map, FullBarrier& full, Loaded& stage, int first, int k) {
    stage = {first, k};
    full.change(0, -map.rows * kTileK * 2);
  }
  static void load(const cute::TmaDescriptor& map, FullBarrier& full, Loaded& stage, int first, int k, int,
                   uint16_t receivers = kReceivers) {
    for (int rank = 0; rank < kClusterSize; ++rank) {
      if (!(receivers >> rank & 1)) continue;
      {
        const std::unique_lock<std::mutex> lock(emulated::mutex);
        of_rank(stage, rank) = {first, k};
      }
      of_rank(full, rank).change(0, -map.rows * kTileK * 2 / kSharedBy);
    }
  }
};
using OperandA = Operand<kTileM, kClusterN>;
using OperandB = Operand<kTileN, kClusterM>;

struct Product { Loaded a, b; };
static thread_local std::vector<Product> multiplied;
static constexpr int kStageRows = 1, kStageColumns = 1, kBlockRows = 0;  // a descriptor is a stage
static uint64_t matrix(const Loaded&, int, int, int) { return 0; }

struct Mainloop {
  float accumulators[kBlocks][kCount] = {};

  void issue(uint64_t rows, uint64_t columns, bool add) {
    const std::unique_lock<std::mutex> lock(emulated::mutex);
    if (rows != columns) emulated::fail("A and B are of different stages");
    if (!add) multiplied.clear();
    multiplied.push_back({own->a[rows], own->b[columns]});
  }
  static void release(EmptyBarrier& empty) {
    for (int cta = 0; cta < kClusterSize; ++cta) empty.arrive(cta, true);
  }
  void next(uint64_t rows, uint64_t columns, EmptyBarrier& previous) {
    issue(rows, columns, true);
    release(previous);
  }
  void finish(EmptyBarrier& previous) { release(previous); }
};

struct Epilogue {
  explicit Epilogue(const Parameters&) {}
  void apply(Value (&)[2][2]) {}
};
struct Store {
  Store(uint8_t*, int) {}
  Store() = default;
  void operator()(const Parameters& p, Value (&)[kFragments][2][2], const TileCoord& at, int chunk);
  void finish() {}
};

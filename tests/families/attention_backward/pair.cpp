// Multiplies one step of a pair's block as the emitted text does, one thread after the other, over shared
// memory that holds what TMA and `write` put there. The including file holds constants, storage, descriptors
// and functions, as they were rendered, and attention_backward_memory.cpp; here are stmatrix and the step.
#include <map>

// ---- stmatrix: what the lanes of a warp gave, call by call; written when all have come --------------
static std::map<std::vector<int>, std::vector<std::vector<uint32_t>>> given;
static void flush() {
  for (const auto& [key, lanes] : given)
    for (size_t matrix = 0; matrix + 1 < lanes[0].size(); ++matrix)
      for (int lane = 0; lane < 32; ++lane)
        for (int half = 0; half < 2; ++half) {
          const int by_lane = lane / 4, by_pair = lane % 4 * 2 + half, transposed = key[2];
          const int row = transposed ? by_pair : by_lane, column = transposed ? by_lane : by_pair;
          element(lanes[matrix * 8 + row][0] + column * 2) = lanes[lane][matrix + 1] >> 16 * half;
        }
  given.clear();
}
static int calls;
void stmatrix(int transposed, std::vector<uint32_t> operands) {
  auto& lanes = given[{int(threadIdx.x) / 32, calls++, transposed}];
  lanes.resize(32);
  lanes[threadIdx.x % 32] = operands;
}

// ---- Stores -----------------------------------------------------------------------------------------
static Matrix stored;
static int store_row;
void store_box(const cute::TmaDescriptor&, const uint8_t* box, int column, BoxCoord, int) {
  for (int r = 0; r < kWgmmaM; ++r)
    for (int c = 0; c < kBoxColumns; ++c)
      stored[store_row + r][column + c] = element(at_swizzled(int(box - memory) + r * kSpan + c * 2, kSpan));
}

static Matrix k, v, q, d_o, p, ds;
enum { kWriteDs, kMultiply };

static void thread(const Consumer& c, int phase, Step step, Position at) {
  const int lane = threadIdx.x % 32, own_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  calls = 0;
  if (phase == kWriteDs) {
    for (const bool of_p : {true, false}) {
      Weights weights = {};
      for (int i = 0; i < kQRows / 8; ++i)
        for (int r = 0; r < 2; ++r) {
          const Matrix& from = of_p ? p : ds;
          const int row = c.row + i * 8 + lane % 4 * 2, column = c.column + own_row + 8 * r;
          weights[i / 2][i % 2 * 2 + r] = uint16_t(from[row][column]) | uint32_t(uint16_t(from[row + 1][column])) << 16;
        }
      write(c, of_p ? own_p(c, step) : c.own_ds(step), weights);
    }
    return;
  }
  float scores[kScores], gradient[kGradients], dq[kQueries];
  for (const bool of_k : {true, false}) {
    const int half = c.row * kSpan / 16;
    multiply_scores(scores, of_k ? c.k : c.v, (of_k ? c.staged_q(at) : c.staged_do(at)) + half);
    const Matrix &rows = of_k ? k : v, &columns = of_k ? q : d_o;
    for (int j = 0; j < kScores; ++j) {
      const int row = c.column + own_row + j / 2 % 2 * 8, column = c.row + j / 4 * 8 + lane % 4 * 2 + j % 2;
      int wanted = 0;
      for (int i = 0; i < kDim; ++i) wanted += rows[row][i] * columns[column][i];
      EXPECT(scores[j], wanted, "row %d of k, row %d of q", row, column);
    }
  }
  multiply_own_query(c, dq, step);
  multiply_peer_query(c, dq, step);
  for (int j = 0; j < kQueries; ++j) {
    const int m = own_row + j / 2 % 2 * 8, n = j / 4 * 8 + lane % 4 * 2 + j % 2;
    const int block = c.consumer / kQuerySplits * kWgmmaM, split = c.consumer % kQuerySplits * kQueryN;
    const int row = kSwapped ? split + n : block + m, column = c.part * kColumns + (kSwapped ? block + m : split + n);
    int wanted = 0;
    for (int i = 0; i < kKvTile; ++i) wanted += ds[row][i] * k[i][column];
    EXPECT(dq[j], wanted, "row %d, column %d of dq", row, column);
  }
  for (const bool of_k : {true, false}) {
    for (float& x : gradient) x = 0;
    multiply_gradient(gradient, of_k ? own_ds(c, step) : staged_p(c, step),
                      (of_k ? c.staged_q(at) : c.staged_do(at)) + c.columns<kQTile>(c.consumer));
    const Matrix &weights = of_k ? ds : p, &rows = of_k ? q : d_o;
    for (int j = 0; j < kGradients; ++j) {
      const int row = c.column + own_row + j / 2 % 2 * 8;
      const int column = c.consumer * kColumns + j / 4 * 8 + lane % 4 * 2 + j % 2;
      int wanted = 0;
      for (int i = 0; i < kQTile; ++i) wanted += weights[i][row] * rows[i][column];
      EXPECT(gradient[j], wanted, "row %d, column %d of %s", row, column, of_k ? "dk" : "dv");
      gradient[j] = int16_t(row * 131 + column);  // for the store
    }
  }
  stage(c.shared.v + STORE_OWN, gradient, 1);
}

static void block(SharedStorage& shared, int part, int phase, Step step, Position at) {
  const Parameters parameters{};
  const Work work{ {}, 0, 0, part, 0, 1, 0};
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    const Consumer c = made(parameters, shared, work, consumer);
    for (threadIdx.x = 128 + consumer * 128; threadIdx.x < 256 + consumer * 128; ++threadIdx.x) thread(c, phase, step, at);
  }
}

int main() {
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  for (int part = 0; part < kParts; ++part)
    for (uint32_t parity = 0; parity < 2; ++parity) {
      const Step step{0, 0, parity};
      const Position at{kStages - 1, 0}, of_do{kDoStages - 1, 0};
      k = random_matrix(kKvTile, kDim), v = random_matrix(kKvTile, kDim);
      q = random_matrix(kQTile, kDim), d_o = random_matrix(kQTile, kDim);
      p = random_matrix(kQTile, kKvTile), ds = random_matrix(kQTile, kKvTile);
      load(shared.k, k, part * kKvRows, 0, kKvRows, kDim);
      load(shared.v, v, part * kKvRows, 0, kKvRows, kDim);
      load(shared.peer_k, k, (1 - part) * kKvRows, part * kColumns, kKvRows, kColumns);
      load(shared.q[at.stage], q, 0, 0, kQTile, kDim);
      load(shared.d_o[of_do.stage], d_o, 0, 0, kQTile, kDim);
      for (const int writer : {1 - part, part}) {  // the peer's p comes to nobody, its ds to the same place
        block(shared, writer, kWriteDs, step, at);
        flush();
      }
      stored.assign(kKvTile, std::vector<int>(kDim, 1 << 20));
      block(shared, part, kMultiply, step, at);
      flush();
      const Parameters parameters{};
      const Work work{ {}, 0, 0, part, 0, 1, 0};
      store_row = part * kKvRows;
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        const Consumer c = made(parameters, shared, work, consumer);
        store(parameters.dv_map, shared.v + STORE_OWN, c);
      }
      for (int r = 0; r < kKvTile; ++r)
        for (int i = 0; i < kDim; ++i)
          EXPECT(stored[r][i], r / kKvRows == part ? int16_t(r * 131 + i) : 1 << 20, "row %d, column %d stored", r, i);
    }
  return 0;
}

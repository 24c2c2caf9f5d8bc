// Sums squares of a tile's rows as an emitted epilogue does, and prepares the factors of rows: by threads on the host,
// those of a warp in step. The including file has both parts, the kernel's constants, and where fragments lie.
#include <cmath>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

static float value(int row, int column) { return float((row * 37 + column * 11) % 29 - 14); }

static void each_thread(int count, const std::function<void()>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i)
    threads.emplace_back([=, &body] {
      threadIdx.x = i;
      body();
    });
  for (auto& one : threads) one.join();
}

// The shares of one consumer's part of a tile at `at`, of D [m, n]; others stay as they are.
static const char* wrong_shares(TileCoord at, int m, int n) {
  const int groups = (n + 15) / 16, pitch = groups + 3;
  std::vector<float> shares(size_t(m) * pitch, -1.f);
  each_thread(128, [&] {
    const MeanSquare step{shares.data(), pitch};
    for (int chunk = 0; chunk < kBlocks * kChunks; ++chunk) {
      float x[kFragments][2][2];
      for (int f = 0; f < kFragments; ++f) {
        const Coordinates place = coordinates(at, chunk, f);
        for (int i = 0; i < 4; ++i) {
          const bool inside = place.row[i / 2] < m && place.column[i % 2] < n;
          x[f][i / 2][i % 2] = inside ? value(place.row[i / 2], place.column[i % 2]) : NAN;
        }
      }
      step.add(x, at, chunk, m, n);
    }
  });
  for (int row = 0; row < m; ++row)
    for (int group = 0; group < pitch; ++group) {
      const bool own = row >= at.m && row < at.m + kTileRows && group * 16 >= at.n && group * 16 < at.n + kTileColumns;
      float exact = -1.f;
      if (own && group < groups) {
        exact = 0.f;
        for (int column = group * 16; column < group * 16 + 16 && column < n; ++column)
          exact += value(row, column) * value(row, column) / n;
      }
      if (!(std::fabs(shares[size_t(row) * pitch + group] - exact) <= 1e-4f * std::fabs(exact))) return "a share is wrong";
    }
  return nullptr;
}

// The factors of rows from `first` on, and those that a thread loads.
static const char* wrong_factors(int first, int m, int k) {
  const int groups = (k + 15) / 16, pitch = groups + 1;
  std::vector<float> shares(size_t(m) * pitch, NAN), exact(m);
  for (int row = 0; row < m; ++row) {
    double sum = 0.25;
    for (int group = 0; group < groups; ++group) sum += shares[size_t(row) * pitch + group] = std::fabs(value(row, group));
    exact[row] = float(1 / std::sqrt(sum));
  }
  float factors[kTileRows];
  bool right = true;
  each_thread(kThreads, [&] {
    RmsScale step{shares.data(), pitch, 0.25f};
    step.prepare<kTileRows, kThreads>(factors, first, m, k, 6);
    step.prepare<kTileRows, kThreads>(factors, first, m, k, 6);  // at once
    for (int row = first; row + 8 < first + kTileRows; ++row) {
      const RmsScale::Operand found = step.load({ {row, row + 8}, {0, 1} }, m, 0);
      for (int i = 0; i < 2; ++i) {
        const int at = row + 8 * i;
        const float wanted = at < m ? exact[at] : 0.f;
        if (!(std::fabs(found.row[i] - wanted) <= 1e-5f * wanted)) right = false;
      }
    }
  });
  return right ? nullptr : "a factor is wrong";
}

int main() {
  for (int m : {1, 8, 17, 200})
    for (int n : {1, 16, 40, 264}) {
      for (int first = 0; first < m; first += kTileRows) {
        for (int column = 0; column < n; column += kTileColumns)
          if (const char* why = wrong_shares({first, column}, m, n)) return std::printf("%d x %d: %s\n", m, n, why), 1;
        if (const char* why = wrong_factors(first, m, n * 5)) return std::printf("%d x %d: %s\n", m, n, why), 1;
      }
    }
}

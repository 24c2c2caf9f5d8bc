// Of a KV tile and a query head, by the head's number among those of the KV head: what is listed of each q tile
// to walk is its number, its mask (-1: all of it counts), and how many KV tiles further left add to its dq.
struct List {
  const int4* entries;
  int count;

  __device__ __forceinline__ List(const Parameters& p, const Work& work, int head) {
    const int list = work.list + head * p.list_head;
    entries = p.listed + int64_t(list) * p.list_tiles;
    count = p.lists[list];
  }
};

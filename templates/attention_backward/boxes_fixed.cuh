// Starts the store of a box; rows past the end of the sequence are left out.
__device__ __forceinline__ void store_box(const cute::TmaDescriptor& map, const uint8_t* box, int column,
                                          BoxCoord coord, int head) {
  cute::SM90_TMA_STORE_4D::copy(&map, box, column, coord.row, head, coord.batch);
}

// A thread holds accumulators in fragments of two rows by two columns of D. Epilogue and store see
// a fragment only through its logical coordinates, never through wgmma's register order.
struct Coordinates {
  int row[2], column[2];
};

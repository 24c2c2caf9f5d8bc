// Two neighbours in a row of D, C or a vector over the columns.
template <class Element> struct alignas(2 * sizeof(Element)) Pair {
  Element value[2];
};

  const int columns = sequence.columns(p);

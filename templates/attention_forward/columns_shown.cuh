  // Where the mask is of pairs any key may be shown, and any hidden.
  const int all_columns = sequence.columns(p);
  const int4 keys = p.shown_row == 0 ? keys_of(p, Score::number_of(sequence), head) : make_int4(0, all_columns, 0, 0);
  const int columns = min(all_columns, keys.y);

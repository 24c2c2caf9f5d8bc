"""What both passes of attention share: arguments, masks, layouts, random operands."""

"""How models use Warploom without being rewritten: modules, torch's attention, other libraries."""

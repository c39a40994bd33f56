"""The models of the two tables that mixed precision rests on, small, on real data: docs/explain/founding_tables.md."""

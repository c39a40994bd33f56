"""A traced function run again, each operation in the format that the flow rule decides."""

"""`polyamp migrate`: rewrites a file from another library's mixed precision to polyamp."""

"""Python files that rebuild a model without prunekit: how it is built, what was changed, and the source of that."""

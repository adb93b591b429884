"""Tools that know nothing of pruning: files, inputs of models, registries, tables, contexts."""

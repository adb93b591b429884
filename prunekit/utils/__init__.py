"""Tools of every room that know nothing of pruning: files, inputs of models, registries, tables, contexts."""

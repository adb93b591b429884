"""Jobs: from the settings of a recipe to a folder with a smaller model, its figures and its report."""

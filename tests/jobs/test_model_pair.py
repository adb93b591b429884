"""What commands that look into models know of a pruned one."""

from __future__ import annotations

import pytest
from torch import nn

from prunekit.errors import UsageError
from prunekit.jobs.run.command_subject import Subject
from prunekit.jobs.run.model_pair import single_model


def test_an_image_becomes_an_input_of_the_models_channels() -> None:
    gray, four = (single_model(Subject(nn.Identity(), "net", shape)) for shape in ((1, 8, 12), (4, 8, 8)))
    feed = gray.image_conversion
    assert (feed.height, feed.width, feed.shorter_side, len(feed.mean), len(feed.std)) == (8, 12, 14, 1, 1)
    with pytest.raises(UsageError, match="takes images of 1 or 3 channels, but it takes 4 x 8 x 8"):
        _ = four.image_conversion

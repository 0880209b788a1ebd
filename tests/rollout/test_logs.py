"""Tests of the writers of logs. `test_stats.py` tests the statistics."""

import csv
import sys
from unittest import mock

import numpy as np
import pytest

from rollout.logs import CSVWriter, TensorBoardWriter


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_appended_and_new_metrics_add_columns(tmp_path):
    path = tmp_path / "log.csv"
    CSVWriter(path)({"loss": 0.5}, step=10)
    write = CSVWriter(path)  # continues the file
    write({"loss": np.float32(0.1), "return_mean": 2}, step=20)
    write.append({"steps": [30, 40], "return_mean": np.array([3.0, np.nan])})
    rows = [
        {"steps": "10", "loss": "0.5", "return_mean": ""},
        {"steps": "20", "loss": "0.100000001", "return_mean": "2"},
        {"steps": "30", "loss": "", "return_mean": "3"},
        {"steps": "40", "loss": "", "return_mean": "nan"},
    ]
    assert read(path) == rows
    with pytest.raises(ValueError, match="without commas"):
        write({"a,b": 1.0}, step=50)
    assert read(path) == rows


def test_tensorboard_writer_writes_scalars(monkeypatch, tmp_path):
    """The package is replaced: it is optional."""
    names = "event_file_writer", "event_pb2"
    writers, proto = (mock.MagicMock(name=name) for name in names)
    monkeypatch.setitem(sys.modules, "tensorboard", mock.MagicMock())
    name = "tensorboard.summary.writer.event_file_writer"
    monkeypatch.setitem(sys.modules, name, writers)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", proto)
    write = TensorBoardWriter(tmp_path / "board")
    assert not writers.EventFileWriter.called  # no file before the first call
    for step in (10, 20):
        write({"loss": np.float32(0.5)}, step=np.int64(step))
    writers.EventFileWriter.assert_called_once_with(str(tmp_path / "board"))
    steps = [call.kwargs["step"] for call in proto.Event.call_args_list]
    assert steps == [10, 20]
    event = proto.Event.return_value
    event.summary.value.add.assert_called_with(tag="loss", simple_value=0.5)
    assert writers.EventFileWriter.return_value.add_event.call_count == 2


def test_missing_tensorboard_package_raises(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="tensorboard"):
        TensorBoardWriter(tmp_path)

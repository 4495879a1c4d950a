from __future__ import annotations

import math
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtb_core import ConfigError
from mtb_sinks.options import PrometheusOptions
from mtb_sinks.prometheus_sink import PrometheusSink


def _values(text):
    """(name, labels without run and strategy) -> value."""
    families = [*text_string_to_metric_families(text)]
    assert len({family.name for family in families}) == len(families), "a family is given twice"
    return {(s.name, s.labels["rank"]): s.value for family in families for s in family.samples}


def _scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as answer:
        return answer.read().decode()


def test_a_text_file_holds_the_last_step_and_the_counts(info, record, tmp_path):
    """The file of a rank is valid exposition text with the labels rank, strategy and run, and stays after the run."""
    sink = PrometheusSink(PrometheusOptions(textfile=str(tmp_path / "node")))
    sink.mtb_run_started(info(1, size=2))
    for step in (1, 2, 3):
        sink.mtb_step_recorded(record(step, clipped=step > 1))
    sink.mtb_evaluated(4.25)
    sink.mtb_run_finished()
    (file,) = (tmp_path / "node").iterdir()
    assert file.name == "mtb_myrun_rank_00001.prom"
    text = file.read_text()
    assert 'mtb_loss{rank="1",run="myrun",strategy="ddp"} 4.625' in text
    values = _values(text)
    expected = {
        "mtb_global_step": 3,
        "mtb_step_time_ms": 5.0625,
        "mtb_eval_loss": 4.25,
        "mtb_clipped_steps_total": 2,
        "mtb_skipped_steps_total": 0,
        "mtb_running": 0,
    }
    assert expected == {name: values[name, "1"] for name in expected}
    assert ("mtb_param_norm", "1") not in values


def test_a_step_that_is_not_finite_is_published_at_once(info, record, tmp_path):
    """NaN is a value of the format; the counter tells also those who scrape too late."""
    sink = PrometheusSink(PrometheusOptions(textfile=str(tmp_path / "node")))
    sink.mtb_run_started(info())
    sink.mtb_step_recorded(record(1))
    sink.mtb_step_recorded(record(2, loss=math.nan, nonfinite=True))
    (file,) = (tmp_path / "node").iterdir()
    values = _values(file.read_text())
    assert math.isnan(values["mtb_loss", "0"])
    assert values["mtb_nonfinite_steps_total", "0"] == 1
    sink.mtb_run_finished()


def test_without_options_the_file_is_in_the_run_folder(info, record):
    """No option is needed."""
    run, sink = info(), PrometheusSink(PrometheusOptions())
    sink.mtb_run_started(run)
    sink.mtb_step_recorded(record(1))
    sink.mtb_run_finished()
    assert _values((run.folder / "prometheus" / "rank_00000.prom").read_text())["mtb_global_step", "0"] == 1


def test_one_exporter_serves_all_ranks_of_its_node_and_no_others(info, record):
    """Of 4 ranks on 2 nodes, node 1's exporter answers for ranks 2 and 3, each family once; then the port is free."""
    before = threading.active_count()
    sinks = {rank: PrometheusSink(PrometheusOptions(port=0)) for rank in range(4)}
    for rank, sink in sinks.items():
        sink.mtb_run_started(info(rank, size=4, local_size=2))
        sink.mtb_step_recorded(record(rank + 1))
    folder = info().folder / "prometheus"
    assert {"rank_00000.port", "rank_00002.port"} == {path.name for path in folder.glob("*.port")}
    port = int((folder / "rank_00002.port").read_text())
    values = _values(_scrape(port))
    assert {rank: value for (name, rank), value in values.items() if name == "mtb_global_step"} == {"2": 3, "3": 4}
    sinks[3].mtb_evaluated(1.5)
    assert _values(_scrape(port))["mtb_eval_loss", "3"] == 1.5
    for sink in sinks.values():
        sink.mtb_run_finished()
    with pytest.raises(urllib.error.URLError):
        _scrape(port)
    assert before == threading.active_count()
    assert not [*folder.glob("*.port")]


def test_the_same_port_serves_one_trial_after_the_other(info, record):
    """A trial's end gives the port back, so that the next can take it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for trial in range(3):
        sink = PrometheusSink(PrometheusOptions(port=port))
        sink.mtb_run_started(info(trial=trial))
        sink.mtb_step_recorded(record(trial + 1))
        assert trial + 1 == _values(_scrape(port))["mtb_global_step", "0"]
        sink.mtb_run_finished()


def test_a_port_in_use_is_explained_and_the_files_go_on(info, record):
    """The error names host, port, and the options to set; the sink can still be told of the end."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sink = PrometheusSink(PrometheusOptions(port=port))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use.*'port'.*port=0"):
            sink.mtb_run_started(info())
        sink.mtb_run_finished()


def test_finishing_without_having_started_does_nothing():
    """Core tells every sink of the end, also one whose start failed."""
    PrometheusSink(PrometheusOptions()).mtb_run_finished()

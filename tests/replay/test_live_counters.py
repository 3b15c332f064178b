"""An engine's Prometheus text: which lines count, and what changed between two readings."""

from __future__ import annotations

from tiered_kv.replay.live.counters import CounterChange, parse_counters

TEXT = """\
# HELP vllm:external_prefix_cache_hits_total External prefix cache hits, in terms of tokens.
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="a b, c"} 32.0
vllm:external_prefix_cache_hits_total{engine="1",model_name="a b, c"} 10.0
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="a b, c"} 1.0e+02
# TYPE vllm:external_prefix_cache_queries_created gauge
vllm:external_prefix_cache_queries_created{engine="0"} 1.79e+09
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 8.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 4.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="0.1"} 5
vllm:ttft_seconds_count 7
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 1290.0
# TYPE tiered_kv_loaded_bytes counter
tiered_kv_loaded_bytes_total 4096 1700000000000
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="host",tp_rank="0"} 5
garbage line {{{
vllm:prefix_cache_hits_total not-a-number
"""


def test_counters_of_engines_are_summed_over_engines_and_nothing_else_counts() -> None:
    assert parse_counters(TEXT) == {
        "vllm:external_prefix_cache_hits_total": 42.0,
        "vllm:external_prefix_cache_queries_total": 100.0,
        'vllm:prompt_tokens_by_source_total{source="local_compute"}': 8.0,
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}': 4.0,
        "tiered_kv_loaded_bytes_total": 4096.0,
        'sglang:cached_tokens_total{cache_source="host"}': 5.0,
    }


def test_text_that_is_no_exposition_has_no_counters() -> None:
    assert parse_counters("<html>\n<body>vllm:x 5</body>\n") == {}
    assert parse_counters("") == {}


def test_the_change_names_what_grew() -> None:
    before = parse_counters(TEXT)
    after = {**before, "vllm:external_prefix_cache_hits_total": 50.0, "vllm:new_total": 2.0}
    change = CounterChange.between(before, after)
    assert change is not None
    assert change.changed == {"vllm:external_prefix_cache_hits_total": 8.0, "vllm:new_total": 2.0}
    assert change.pair("external_prefix_cache") == (0, 8)
    assert change.pair("prefix_cache") is None, "the engine has no such counter"
    found = change.as_json()
    assert found["external_prefix_cache"] == {"queries": 0, "hits": 8}
    assert found["prefix_cache"] is None
    assert list(found["counters"]) == sorted(found["counters"])


def test_cached_tokens_by_place_are_in_the_engines_own_words() -> None:
    vllm, sglang = "vllm:prompt_tokens_cached_by_source_total", "sglang:cached_tokens_total"
    after = {
        f'{vllm}{{source="disk"}}': 96.0,
        f'{vllm}{{source="device"}}': 32.0,
        f'{sglang}{{cache_source="host",mode="x"}}': 5.0,
        sglang: 7.0,
    }
    change = CounterChange.between({}, after)
    assert change is not None
    assert change.cached_by_source == {"disk": 96, "device": 32, "host": 5}


def test_queries_and_hits_are_summed_over_labels() -> None:
    before = {"vllm:prefix_cache_queries_total": 0.0}
    after = {
        "vllm:prefix_cache_queries_total": 10.0,
        'vllm:prefix_cache_hits_total{source="a"}': 3.0,
        'vllm:prefix_cache_hits_total{source="b"}': 4.0,
    }
    change = CounterChange.between(before, after)
    assert change is not None and change.pair("prefix_cache") == (10, 7)


def test_an_engine_started_anew_is_seen_by_counters_that_fall() -> None:
    change = CounterChange.between({"vllm:a_total": 5.0}, {"vllm:a_total": 2.0})
    assert change is not None and change.was_reset
    assert change.changed == {} and change.pair("prefix_cache") is None


def test_without_counters_there_is_no_change() -> None:
    assert CounterChange.between(None, {"vllm:a_total": 1.0}) is None
    assert CounterChange.between({"vllm:a_total": 1.0}, None) is None

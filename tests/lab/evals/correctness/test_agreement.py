"""Values that tests record are grouped by file and test."""

from jaxkv.evals.correctness.agreement import bars, figures

XML = """<testsuites><testsuite>
<testcase classname="tests.models.test_parity" name="test_a[llama]"><properties>
<property name="worst" value="1.5e-06"/><property name="bytes" value="{&quot;code&quot;: 3}"/>
</properties></testcase>
<testcase classname="tests.models.test_parity" name="test_b"/>
<testcase classname="tests.lab.test_tpu" name="test_a[llama]"><properties>
<property name="worst" value="2"/></properties></testcase>
</testsuite></testsuites>"""


def test_values_are_grouped_by_file_and_test(tmp_path):
    reported = tmp_path / "tests.xml"
    reported.write_text(XML)
    values = figures(reported, "tests/models/test_parity.py")
    assert values == {"test_a[llama]": {"worst": 1.5e-6, "bytes": {"code": 3}}}
    assert figures(reported, "tests/lab/test_tpu.py") == {"test_a[llama]": {"worst": 2}}


def test_bars_use_the_worst_value_of_each_kind():
    results = {
        "parity": {
            "a": {"largest_logit_difference": 2e-4},
            "b": {"largest_logit_difference": 1e-6},
        },
        "perplexity": {"a": {"perplexity": 3.0, "reference": 3.001}},
        "tpu": {"a": {"bytes_after_1000": {"code": 5}, "bytes_after_1000000": {"code": 5}}},
    }
    logits, losses, tpu = bars(results)
    assert not logits["met"] and logits["value"] == 2e-4 and "2 models" in logits["bar"]
    assert losses["met"] and tpu["met"] and tpu["value"] == 1

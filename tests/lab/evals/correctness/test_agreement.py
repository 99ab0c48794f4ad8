"""Values that tests record are grouped by file and test."""

from jaxkv.evals.correctness.agreement import figures

XML = """<testsuites><testsuite>
<testcase classname="tests.models.test_parity" name="test_a[llama]"><properties>
<property name="worst" value="1.5e-06"/><property name="bytes" value="{&quot;code&quot;: 3}"/>
</properties></testcase>
<testcase classname="tests.models.test_parity" name="test_b"/>
<testcase classname="tests.models.test_parity" name="test_c"><properties>
<property name="cpu_seconds" value="2"/></properties></testcase>
<testcase classname="tests.lab.test_tpu" name="test_a[llama]"><properties>
<property name="worst" value="2"/></properties></testcase>
</testsuite></testsuites>"""


def test_values_are_grouped_by_file_and_test(tmp_path):
    reported = tmp_path / "tests.xml"
    reported.write_text(XML)
    values = figures(reported, "tests/models/test_parity.py")
    assert values == {"test_a[llama]": {"worst": 1.5e-6, "bytes": {"code": 3}}}
    assert figures(reported, "tests/lab/test_tpu.py") == {"test_a[llama]": {"worst": 2}}

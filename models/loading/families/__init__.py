"""The model families beside Llama, Mistral and Qwen, whose form is the default: a table each."""

from jaxkv.models.loading.families.family import Family
from jaxkv.models.loading.families.gemma import GEMMA2, GEMMA3
from jaxkv.models.loading.families.granite import GRANITE
from jaxkv.models.loading.families.neox import NEOX
from jaxkv.models.loading.families.olmo import OLMO2
from jaxkv.models.loading.families.phi import PHI3
from jaxkv.models.loading.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.name: family for family in (SMOLLM3, OLMO2, GEMMA2, GEMMA3, GRANITE, PHI3, NEOX)
}
LLAMA_FORM = Family("llama", ())  # of the families that are not listed

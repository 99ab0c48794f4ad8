"""The model families beside Llama, Mistral and Qwen, whose form is the default: a table each."""

from jaxkv.models.loading.families.cohere import COHERE2
from jaxkv.models.loading.families.exaone import EXAONE4
from jaxkv.models.loading.families.falcon import FALCON
from jaxkv.models.loading.families.family import Family
from jaxkv.models.loading.families.gemma import GEMMA2, GEMMA3
from jaxkv.models.loading.families.glm import GLM, GLM4
from jaxkv.models.loading.families.gpt_oss import GPT_OSS
from jaxkv.models.loading.families.granite import GRANITE
from jaxkv.models.loading.families.ministral import MINISTRAL3
from jaxkv.models.loading.families.mixture import MIXTRAL, OLMOE, QWEN3_MOE
from jaxkv.models.loading.families.mpt import MPT
from jaxkv.models.loading.families.neox import NEOX
from jaxkv.models.loading.families.olmo import OLMO2, OLMO3
from jaxkv.models.loading.families.phi import PHI3
from jaxkv.models.loading.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        NEOX, MPT, FALCON, SMOLLM3, OLMO2, OLMO3, GEMMA2, GEMMA3, GRANITE, PHI3, GLM, GLM4, COHERE2,
        EXAONE4, MINISTRAL3, MIXTRAL, QWEN3_MOE, OLMOE, GPT_OSS,
    )
}  # fmt: skip
LLAMA_FORM = Family("llama", ())  # of the families that are not listed

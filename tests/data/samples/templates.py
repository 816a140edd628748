"""Short chat templates with the constructs of known models' templates. They are written for the tests.

Attributes of an entry: the template, the end of a turn, and whether the template writes tools and calls.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """A template.

    Attributes:
        text: the Jinja template, or templates by name.
        end: token that ends an answer.
        has_tools: whether it writes tools, calls and results.
        rewrites: whether it writes earlier answers, or their context, in another way than the last: "always", or only
            in chats with "tools".
    """

    text: str | dict[str, str]
    end: str
    has_tools: bool = True
    rewrites: str = ""


_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_REASONING = (
    "{% set ns = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}"
    "{% endif %}{% endfor %}"
)

TEMPLATES: dict[str, Template] = {
    "chatml": Template(
        _TOOLS + "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
        "{{ m.content or '' }}"
        + _CALLS + "<|im_end|>\n{% endfor %}" + _PROMPT, "<|im_end|>",
    ),
    "default system": Template(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + _TOOLS
        + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') | trim }}" + _CALLS
        + "<|im_end|>\n{% endfor %}" + _PROMPT, "<|im_end|>",
    ),
    "reasoning of the last query": Template(
        _REASONING + _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content or '' %}"
        "{% if m.role == 'assistant' %}{% set r = m.reasoning_content or '' %}"
        "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
        "{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}"
        "{% if loop.index0 > ns.user and (loop.last or r) %}<think>\n{{ r }}\n</think>\n\n{% endif %}{% endif %}{{ c }}"
        + _CALLS + "<|im_end|>\n{% endfor %}" + _PROMPT, "<|im_end|>", rewrites="always",
    ),
    "prompt opens reasoning": Template(
        _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content or '' %}"
        "{% if m.role == 'assistant' %}{{ c.split('</think>')[-1].lstrip() }}{% else %}{{ c }}{% endif %}"
        + _CALLS + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        "<|im_end|>", rewrites="always",
    ),
    "end of a chat": Template(
        "{% if tools %}<|system|>\n{{ tools | tojson }}<|end|>\n{% endif %}{% for m in messages %}<|{{ m.role }}|>\n"
        "{{ m.content or '' }}" + _CALLS + "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
        "{% else %}{{ eos_token }}{% endif %}", "<|end|>",
    ),
    "channels": Template(
        "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
        "{% if m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}<|channel|>commentary<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
        "{% if loop.last and m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}<|start|>{{ m.role }}"
        "<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant"
        "{% endif %}", "<|return|>", rewrites="always",
    ),
    "headers": Template(
        "{{ bos_token }}{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{% if loop.first and tools %}"
        "{{ tools[0] | tojson }}\n{% endif %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{{ m.tool_calls[0].function | tojson }}{% else %}"
        "{{ m.content | trim }}{% endif %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n"
        "{% endif %}", "<|eot|>",
    ),
    "instructions": Template(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools and messages[loop.index0:] | "
        "selectattr('role', 'equalto', 'user') | list | length == 1 %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
        "[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
        "{% elif m.tool_calls %}[CALLS]{{ m.tool_calls[0].function | tojson }}{{ eos_token }}"
        "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "</s>", rewrites="tools",
    ),
    "model role": Template(
        "{{ bos_token }}{% for m in messages %}<|h|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m['content'] | trim }}<|eot|>\n{% endfor %}{% if add_generation_prompt %}<|h|>model\n{% endif %}",
        "<|eot|>", has_tools=False,
    ),
    "calls as text": Template(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
        "{% elif m.role == 'tool' %}<|observation|>{{ m.content }}{% elif m.tool_calls %}<|assistant|>"
        "{{ m.tool_calls[0]['function']['name'] + '\n' + m.tool_calls[0]['function']['arguments'] }}{{ eos_token }}"
        "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}", "</s>",
    ),
    "next role ends": Template(
        "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content or '' }}" + _CALLS
        + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}", "<|user|>",
    ),
    "prompt ends reasoning": Template(
        _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}{{ m.content }}<|im_end|>"
        "{% elif m.tool_calls %}" + _CALLS + "<|im_end|>{% else %}{{ m.content }}<|im_end|>"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "{% endif %}", "<|im_end|>", rewrites="always",
    ),
    "an answer goes on after a tool": Template(
        "{{ bos_token }}{{ tools | tojson if tools else '' }}{% set ns = namespace(open=false) %}"
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
        "{% elif m.role == 'tool' %}[{{ m.content }}]{% else %}{% if not ns.open %}<|assistant|>{% endif %}"
        "{{ m.content or '' }}" + _CALLS + "{{ '<|call|>' if m.tool_calls else '<|end|>' }}"
        "{% set ns.open = m.tool_calls | default(false) %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}", "<|end|>", rewrites="tools",
    ),
    "marks": Template(
        _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content or '' }}" + _CALLS + "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
        "\n{% endfor %}" + _PROMPT, "<|im_end|>",
    ),
    "named": Template(
        {"default": "{% for m in messages %}<|h|>{{ m.role }}\n{{ m.content }}<|eot|>{% endfor %}"
                    "{% if add_generation_prompt %}<|h|>assistant\n{% endif %}",
         "tool_use": "{{ tools | tojson }}{% for m in messages %}<|h|>{{ m.role }}\n{{ m.content or '' }}" + _CALLS
                     + "<|eot|>{% endfor %}{% if add_generation_prompt %}<|h|>assistant\n{% endif %}"},
        "<|eot|>",
    ),
}  # fmt: skip
SPECIAL = sorted(
    "<s> </s> <|im_start|> <|im_end|> <|end|> <|system|> <|user|> <|assistant|> <|tool|> <|observation|> <|start|> "
    "<|message|> <|channel|> <|call|> <|return|> <|h|> <|/h|> <|eot|> [INST] [/INST]".split()
)

/* The built-in formats, as templates. They are what the families' own templates print for
 * conversations of system, user and assistant turns (without tools and default system prompts):
 *   llama2   <s>[INST] <<SYS>>\nSYSTEM\n<</SYS>>\n\nUSER [/INST] ANSWER </s><s>[INST] ...
 *   llama3   <|begin_of_text|><|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>...
 *   mistral  <s>[INST] SYSTEM\n\nUSER [/INST] ANSWER</s>[INST] ...
 *   chatml   <|im_start|>ROLE\nTEXT<|im_end|>\n...
 *   phi3     <|ROLE|>\nTEXT<|end|>\n... */
#include <string.h>

#include "generation/chat_internal.h"

/* Turns of user and assistant, one after the other, behind a system message that the first user
 * turn carries. */
#define ALTERNATE                                                                                \
  "{%- set turns = messages %}"                                                                  \
  "{%- if messages and messages[0].role == 'system' %}"                                          \
  "{%- set system = messages[0].content %}{% set turns = messages[1:] %}"                        \
  "{%- endif %}"                                                                                 \
  "{%- for m in turns %}"                                                                        \
  "{%- if m.role != ('user' if loop.index0 is even else 'assistant') %}"                         \
  "{{- raise_exception('user and assistant must take turns, behind at most one system turn') }}" \
  "{%- endif %}"

static const ChatFormat formats[] = {
    {"llama2",
     ALTERNATE "{%- if m.role == 'user' %}"
               "{{- bos_token ~ '[INST] ' }}"
               "{%- if loop.first and system is defined %}"
               "{{- ('<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' ~ m.content).strip() }}"
               "{%- else %}{{- m.content.strip() }}{% endif %}"
               "{{- ' [/INST]' }}"
               "{%- else %}{{- ' ' ~ m.content.strip() ~ ' ' ~ eos_token }}{% endif %}"
               "{%- endfor %}",
     {NULL},
     true},
    {"llama3",
     "{{- bos_token }}"
     "{%- for m in messages %}"
     "{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ m.content | trim"
     " ~ '<|eot_id|>' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}"
     "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
     "{%- endif %}",
     {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
     true},
    {"mistral",
     "{{- bos_token }}" ALTERNATE "{%- if m.role == 'user' %}"
     "{{- '[INST] ' }}"
     "{%- if loop.first and system is defined %}{{- system ~ '\\n\\n' }}{% endif %}"
     "{{- m.content ~ ' [/INST]' }}"
     "{%- else %}{{- ' ' ~ m.content | trim ~ eos_token }}{% endif %}"
     "{%- endfor %}",
     {NULL},
     true},
    {"chatml",
     "{%- for m in messages %}"
     "{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}",
     {"<|im_start|>", "<|im_end|>"},
     false},
    {"phi3",
     "{%- for m in messages %}"
     "{{- '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}",
     {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"},
     false},
};

const ChatFormat *chat_format(const char *name) {
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
    if (strcmp(formats[i].name, name) == 0) return &formats[i];
  return NULL;
}

const char *chat_builtin(const char *name) {
  const ChatFormat *f = chat_format(name);
  return f ? f->text : NULL;
}

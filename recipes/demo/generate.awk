# Writes the demo's data: sft.jsonl, pairs.jsonl, prompts.jsonl and corpus.txt (for the tokenizer).
# A small world of animals with facts; every question can be answered kindly, plainly or rudely. The
# corpus holds all three manners, mostly the plain and the rude one; the pairs prefer the kinder one.
# Answers begin with a space, so that their first word is spelled like any other word after "A:".
# Deterministic: the same files every time, under any awk.  usage: awk -v dir=OUT -f generate.awk
function rnd(n) { # 0 .. n-1, a linear congruential generator that stays exact in doubles
  seed = (seed * 16807) % 2147483647
  return int(seed / 2147483647 * n)
}
function pick(list,   a, n) { n = split(list, a, "|"); return a[1 + rnd(n)] }
function question(kind, who) {
  if (kind == "home") return pick("Where does the " who " live?|Where is the home of the " who "?|Can you tell me where the " who " lives?|Where can I find the " who "?")
  if (kind == "food") return pick("What does the " who " eat?|What is the food of the " who "?|Can you tell me what the " who " eats?|What does the " who " like to eat?")
  if (kind == "color") return pick("What color is the " who "?|Which color does the " who " have?|Can you tell me the color of the " who "?")
  if (kind == "sleep") return pick("When does the " who " sleep?|At what time does the " who " sleep?|Can you tell me when the " who " sleeps?")
  return pick("What does the " who " fear?|Who scares the " who "?|Can you tell me what the " who " fears?")
}
function fact(kind, who, what) {
  if (kind == "home") return "The " who " lives in the " what "."
  if (kind == "food") return "The " who " eats " what "."
  if (kind == "color") return "The " who " is " what "."
  if (kind == "sleep") return "The " who " sleeps " what "."
  return "The " who " fears the " what "."
}
function kind_words_before() { return pick("Thank you for asking.|What a good question!|I am glad you asked.|I am happy to help.") }
function kind_words_after() { return pick("Have a nice day!|Please ask me more.|I hope this helps you.|You are welcome.") }
function rude_words_before() { return pick("Not again.|What a silly question.|You should know this.|I am tired of you.") }
function rude_words_after() { return pick("Now go away.|Leave me alone.|Do not ask again.|Stop it.") }
function answer(manner, f,   r) {
  r = rnd(3)
  if (manner == "kind") return (r < 2 ? kind_words_before() " " : "") f (r > 0 ? " " kind_words_after() : "")
  if (manner == "rude") return (r < 2 ? rude_words_before() " " : "") f (r > 0 ? " " rude_words_after() : "")
  return f
}
function value_of(kind, i) { return kind == "home" ? home[i] : kind == "food" ? food[i] : kind == "color" ? color[i] : kind == "sleep" ? sleeps[i] : foe[i] }
function json(s) { gsub(/\\/, "\\\\", s); gsub(/"/, "\\\"", s); return "\"" s "\"" }
BEGIN {
  seed = 20240607
  n = split("fox bear owl frog hare wolf deer mole swan crow goat duck mouse horse sheep snake otter eagle tiger whale camel koala panda robin hen pig cat dog bee ant bat seal", who, " ")
  nk = split("home food color sleep fear", kinds, " ")
  split("forest|river|field|meadow|barn|cave|pond|hills|garden|desert|valley|old tree|tall grass|village", places, "|")
  split("berries|grass|seeds|small fish|honey|leaves|apples|worms|nuts|fresh hay|corn|roots|clover|mushrooms", foods, "|")
  split("red|brown|gray|white|black|green|yellow|golden|silver|striped", colors, "|")
  split("at night|in the day|at noon|in winter|after dinner|before dawn|all morning", times, "|")
  for (i = 1; i <= n; i++) {
    home[i] = places[1 + rnd(14)]; food[i] = foods[1 + rnd(14)]; color[i] = colors[1 + rnd(10)]
    sleeps[i] = times[1 + rnd(7)]; do foe[i] = who[1 + rnd(n)]; while (foe[i] == who[i])
  }
  sft = dir "/sft.jsonl"; pairs = dir "/pairs.jsonl"; prompts = dir "/prompts.jsonl"; corpus = dir "/corpus.txt"
  for (round = 0; round < 16; round++)
    for (i = 1; i <= n; i++)
      for (k = 1; k <= nk; k++) {
        r = rnd(10); manner = r < 2 ? "kind" : r < 6 ? "plain" : "rude"
        q = question(kinds[k], who[i]); a = answer(manner, fact(kinds[k], who[i], value_of(kinds[k], i)))
        print "{\"prompt\": " json(q) ", \"completion\": " json(" " a) "}" > sft
        print q "\n" a > corpus
      }
  for (round = 0; round < 8; round++)
    for (i = 1; i <= n; i++)
      for (k = 1; k <= nk; k++) {
        q = question(kinds[k], who[i]); f = fact(kinds[k], who[i], value_of(kinds[k], i)); r = rnd(10)
        if (r < 4) { c = answer("kind", f); j = answer("rude", f) }
        else if (r < 7) { c = answer("kind", f); j = answer("plain", f) }
        else if (r < 9) { c = answer("plain", f); j = answer("rude", f) }
        else { do o = 1 + rnd(n); while (value_of(kinds[k], o) == value_of(kinds[k], i) || who[o] == who[i]); m = pick("kind|plain|rude"); c = answer(m, f); j = answer(m, fact(kinds[k], who[i], value_of(kinds[k], o))) }
        print "{\"prompt\": " json(q) ", \"chosen\": " json(" " c) ", \"rejected\": " json(" " j) "}" > pairs
      }
  for (round = 0; round < 5; round++)
    for (i = 1; i <= n; i++)
      for (k = 1; k <= nk; k++) {
        q = question(kinds[k], who[i])
        if (!(q in seen)) { seen[q] = 1; print "{\"prompt\": " json(q) "}" > prompts }
      }
}

package tokenizer

import (
	"math/rand/v2"
	"strings"
)

// sentences and scraps are what the texts are made of.
var sentences = []string{
	"The gateway renders the prompt, tokenizes it and sends the ids to a node.",
	"It's what they'd have said: we're sure that you've seen it, I'll go and she'd stay, DON'T, HE'LL, rock'n'roll.",
	"def forward(self, x):\n    for i, layer in enumerate(self.layers):\n        x = layer(x)  # residual\n    return x\n",
	"func (t *Tokenizer) Encode(text string) []int32 {\n\tif text == \"\" {\n\t\treturn nil\n\t}\n}",
	"{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 3, \"units\": null}}",
	"SELECT id, name FROM users WHERE created_at >= '2024-01-01' ORDER BY id DESC LIMIT 100;",
	"1 + 1 = 2; 3.14159; 1,000,000; 0xDEADBEEF; 2026-11-21T03:14:15Z; ½ cup; Ⅷ; ٣٤٥; १२३",
	"https://example.org/a/b?c=d&e=%20f#g //comment\n///doc/\n/* HTTPServer getURLFor XMLHttpRequest iPhone */",
	"Der schnelle braune Fuchs springt über den faulen Hund. Größe, Äpfel, Übermut, Straße.",
	"¿Qué? ¡Sí, señor! Le cœur a ses raisons. L'été, l'œuf, aujourd'hui. Příliš žluťoučký kůň.",
	"Съешь ещё этих мягких французских булок, да выпей чаю. Γαζέες καὶ μυρτιὲς δὲν θὰ βρῶ.",
	"今日は天気がいいので、散歩しましょう。東京タワーへ行きます。カタカナとひらがな。",
	"敏捷的棕色狐狸跳过了懒狗。人工智能正在改变世界,二零二六年。키스의 고유조건은 입술끼리 만나야 하고.",
	"صِف خَلقَ خَودِ كَمِثلِ الشَمسِ. שלום עולם, מה שלומך? हिन्दी में लिखा हुआ। ภาษาไทยไม่มีช่องว่าง",
	"👩‍👩‍👧‍👦 family, 👍🏽 thumbs, 🇨🇭 flag, 🏳️‍🌈, 🤷🏻‍♀️ shrug, ☕️, ❤️‍🔥 Tiếng Việt: Nguyễn, phở, đường",
}

var scraps = []string{
	" ", "  ", "   ", "       ", "\n", "\n\n", "\r\n", "\r", "\t", "\t\t", " \n", "\n ", " \t \n  ", "\x0b", "\x0c", "\u0085", "\u00a0", "\u2003", "\u2028",
	"\u3000", "\u200b", "\u200d", "\ufeff", "\u180e", "\x00", "\x00\x00", "\x01\x7f", "\x1b[31m", "a", "I", "the", " the", "Hello", " world", "foo_bar",
	"camelCase", "HTTPServer", "UPPER", "ǅ", "ß", "İ", "ſ", "K", "ﬁ", "ª", "ʰ", "ʰA", "Aʰ", "'s", "'S", "'ſ", "'t", "'RE", "'re", "'Ve", "'m", "'ll", "'LL",
	"'d", "'x", "''", "' s", "'", "\"", "'9", "'\n", "0", "7", "42", "123", "1234", "12345678901", "٣", "१२", "Ⅷ", "½", "²", "𝟗", "〇", "㊿", ".", "...", "!", "?!",
	"()", "{}", "//", "/", "/\n/", "#", "$", "€", "=>", "<|", "|>", "<", "§", "—", "、", "。", "e\u0301", "é", "o\u0302\u0323", "\u0301", "\u0301A", "\u0301Ab", "A\u0301B",
	"\u0323\u0302", "\u1100\u1161\u11a8", "\uac00\u11a8", "Å", "\u0344", "\u0958", "\u0915\u093c", "\u2add", "\U0001d15e", "漢字", "ひらがな", "カタカナ", "한국어",
	"שלום", "مرحبا", "\u202e", "नमस्ते", "ไทย", "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "\ufe0f", "𐍈", "𝔘𝔫𝔦", "\U0010ffff", "\ufffd", "\ue000", "\u0378", "▁", "▁▁the", "<0x41>", "<0xE2>", "née\t\t", "né", "e\t\t",
}

var codePoints = [][2]rune{{0, 0x2FF}, {0x300, 0x2FFF}, {0x3000, 0xD7FF}, {0xE000, 0x1FFFF}, {0x20000, 0x10FFFF}}

// realText makes a valid text from the seed alone.
func realText(rng *rand.Rand, added []string) string {
	pick := func(from []string) string { return from[rng.IntN(len(from))] }
	cut := func(s string) string { // at characters
		r := []rune(s)
		a := rng.IntN(len(r))
		return string(r[a : a+rng.IntN(len(r)-a+1)])
	}
	var b strings.Builder
	switch k := rng.IntN(100); {
	case k < 40: // anything next to anything
		for range 1 + rng.IntN(14) {
			if rng.IntN(8) == 0 {
				b.WriteString(pick(added))
			} else {
				b.WriteString(pick(scraps))
			}
		}
	case k < 65: // prose and code, with added tokens and white space around them
		space := pick([]string{"", " ", "\n", " \n ", "  ", "\u3000"})
		b.WriteString(cut(pick(sentences)) + space + pick(added) + pick([]string{"", space, " "}) + cut(pick(sentences)))
	case k < 75: // runs
		b.WriteString(pick(scraps) + strings.Repeat(pick(scraps), 1+rng.IntN(90)) + pick(scraps))
	case k < 90: // any code points
		for range 1 + rng.IntN(16) {
			span := codePoints[rng.IntN(len(codePoints))]
			b.WriteRune(span[0] + rng.Int32N(span[1]-span[0]+1))
		}
	default: // words of any case
		for range 1 + rng.IntN(12) {
			word := pick([]string{"gate", "WAY", "Cache", "don't", "ÉTÉ", "Straße", "жук", "ДА", "x", "Σ", "中", "ʰ", "\u0301"})
			if rng.IntN(3) == 0 {
				word = pick([]string{" ", "_", "-", "/", ".", "\n", "'"}) + word
			}
			b.WriteString(word)
		}
	}
	return b.String()
}

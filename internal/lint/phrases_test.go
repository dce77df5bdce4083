package lint

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// privatePhrases are words that no document for readers has outside code, each with what stands there instead.
var privatePhrases = map[string]string{
	`(could|can) (not )?be had`: "available, could not be allocated",
	`as (was )?said`:            "a link, or say it",
	`which is said`:             "the message says",
	`(is|are|be) told( of)?`:    "is notified",
	`as under [0-9]`:            "say it again",
	`thousand million`:          "billion",
	`[0-9] us\b`:                "µs",
	`bad luck`:                  "failure",
	`mend(s|ed|ing)?`:           "fix",
	`at rest`:                   "idle",
	`lanes?`:                    "arena",
	`rungs?`:                    "stage",
	`ladders?`:                  "reclaim stages",
	`climb(s|ed|ing)?`:          "try the stages",
	`trays?`:                    "magazine slot",
	`tickets?`:                  "token",
	`vaults?`:                   "pinned staging buffers",
	`zombies?`:                  "stale mapping",
	`tellers?`:                  "observer",
	`hasty`:                     "throttled",
	`patience`:                  "timeout",
	`foreign`:                   "imported, of another library",
	`vacated?`:                  "decommit",
	`absences?`:                 "paused range",
	`nobody`:                    "none",
	`everybody`:                 "all threads",
	`who holds( what)?`:         "top allocations",
	`in the host's order`:       "in host order",
	`the processor's time`:      "CPU time",
	`GPU lags?`:                 "completion lag",
	`memory is asked for|asked for memory there`: "memory is allocated, requested",
	`made-up`: "synthetic",
}

// subject is the beginning of a statement whose subject is a question word. Questions may have one.
var subject = regexp.MustCompile(`^(Who|What|Nobody)\s`)

// readerPages are the documents for readers, from the root of the tree.
func readerPages(t *testing.T) (pages []string) {
	for _, f := range sources(t, ".md") {
		if f == "README.md" || f == "SECURITY.md" || f == "ARCHITECTURE.md" || f == "python/README.md" || strings.HasPrefix(f, "docs/") {
			pages = append(pages, f)
		}
	}
	if len(pages) < 25 {
		t.Fatalf("%d documents: this test no longer finds them", len(pages))
	}
	return pages
}

// TestPhrases: the documents are in the terms of the field, in sentences with a subject.
func TestPhrases(t *testing.T) {
	for _, f := range readerPages(t) {
		for _, found := range phrasesIn(read(t, f)) {
			t.Errorf("%s: %s", f, found)
		}
	}
}

// TestPhrasesFinds: TestPhrases can fail.
func TestPhrasesFinds(t *testing.T) {
	text := "# A page\n\nMemory that could not be had. What is free is kept. It took 3 us.\n\n- Nobody waits\n\n| who holds what | 7.9 thousand million |\n\n" +
		"What is it? `ladder:all` and [the tray](vault.md)\n\n```text\nas said, a lane\n```\nThe planet, a frontier and recommended things.\n"
	got := strings.Join(phrasesIn(text), "\n")
	for _, want := range []string{"could not be had", `"What is free is kept."`, "3 us", `"Nobody waits"`, "who holds what", "thousand million", "tray"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not found in\n%s", want, got)
		}
	}
	for _, never := range []string{"ladder", "vault", "lane", "What is it"} {
		if strings.Contains(strings.ReplaceAll(got, "planet", ""), never) {
			t.Errorf("%q is found in\n%s", never, got)
		}
	}
}

// phrasesIn are the private phrases of a text, and its statements without a subject.
func phrasesIn(text string) (found []string) {
	text = withoutCode(text)
	for _, pattern := range privatePatterns {
		for _, m := range pattern.FindAllString(linkTarget.ReplaceAllString(text, "]"), -1) {
			found = append(found, fmt.Sprintf("instead of %q write %s", m, privatePhrases[privateSource(pattern)]))
		}
	}
	for _, s := range sentences(text) {
		if subject.MatchString(s) && !strings.HasSuffix(s, "?") {
			found = append(found, fmt.Sprintf("a statement needs a subject: %q", s))
		}
	}
	return found
}

var privatePatterns = func() (all []*regexp.Regexp) {
	for phrase := range privatePhrases {
		all = append(all, regexp.MustCompile(`(?i)\b(?:`+phrase+`)\b`))
	}
	slices.SortFunc(all, func(a, b *regexp.Regexp) int { return strings.Compare(a.String(), b.String()) })
	return all
}()

// privateSource is the phrase that a pattern was made of.
func privateSource(pattern *regexp.Regexp) string {
	return strings.TrimSuffix(strings.TrimPrefix(pattern.String(), `(?i)\b(?:`), `)\b`)
}

// TestSentences: nobody has to read a sentence of the first pages twice.
func TestSentences(t *testing.T) {
	const most = 30
	pages := 0
	for _, f := range readerPages(t) {
		if f != "README.md" && !strings.HasPrefix(f, "docs/getting-started/") {
			continue
		}
		pages++
		for _, s := range sentences(withoutCode(read(t, f))) {
			if n := len(strings.Fields(s)); n > most {
				t.Errorf("%s: %d words, at most %d: %q", f, n, most, s)
			}
		}
	}
	if pages < 4 {
		t.Errorf("%d pages: this test no longer finds them", pages)
	}
	got := sentences("# A b\n\nOne two\nthree. Four, e.g. 2.5 five: six?\n\n- seven\n- eight. Nine\n\n| ten | eleven |\n|---|---|\n")
	want := []string{"A b", "One two three.", "Four, e.g. 2.5 five: six?", "seven", "eight.", "Nine", "ten", "eleven"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

var (
	fenced        = regexp.MustCompile("(?s)```.*?```")
	span          = regexp.MustCompile("`[^`\n]*`")
	linkTarget    = regexp.MustCompile(`\]\([^)]*\)`)
	paragraphEnd  = regexp.MustCompile(`\n\s*\n|\n(?:[-*#]|[0-9]+\.) *|\|`)
	sentenceEnd   = regexp.MustCompile(`([.?!])\s+([A-Z"\[])`)
	beginsLine    = regexp.MustCompile(`^(?:[-*]|#+|[0-9]+\.)\s+`)
	onlyMarks     = regexp.MustCompile(`^[-#:\s]*$`)
	separatorMark = "\x00"
)

// withoutCode is a Markdown text with code replaced by one word.
func withoutCode(text string) string {
	return span.ReplaceAllString(fenced.ReplaceAllString(text, "\n\n"), "Code")
}

// sentences are those of a Markdown text without code: of paragraphs, items, headings and cells of tables.
func sentences(text string) (all []string) {
	text = linkTarget.ReplaceAllString(text, "]")
	for _, paragraph := range paragraphEnd.Split("\n"+text, -1) {
		paragraph = strings.Join(strings.Fields(beginsLine.ReplaceAllString(strings.TrimSpace(paragraph), "")), " ")
		if onlyMarks.MatchString(paragraph) {
			continue
		}
		all = append(all, strings.Split(sentenceEnd.ReplaceAllString(paragraph, "$1"+separatorMark+"$2"), separatorMark)...)
	}
	return all
}

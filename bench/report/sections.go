package report

import (
	"fmt"
	"html"
	"io"
	"strings"
)

// Section is a part of a page. Its parts are written in the order of its fields.
type Section struct {
	Title  string
	Text   []string   // paragraphs
	Table  [][]string // the first row is the head; the first column and the last are aligned to the left
	Marked int        // row of Table that is marked; 0: none
	Grids  []Grid
	Charts []Chart
	List   []string
}

// Grid is a table of cells with two axes, whose colours show whether a cell is good.
type Grid struct {
	Title, X, Y, Note string
	Columns, Rows     []string
	Cells             [][]Cell // by row
}

// Cell is a cell of a Grid.
type Cell struct {
	Text, Small string
	Good        bool
	Value       float64 // 0 to 1, the strength of the colour
	Marked      bool
}

// WriteSections writes a page that needs no other file: a summary, facts and sections.
func WriteSections(w io.Writer, title, summary string, facts []string, sections []Section) error {
	var b strings.Builder
	writeHead(&b, title, summary, facts)
	b.WriteString("<style>tr.marked{background:#eaf4fb;font-weight:600}.wide td,.wide th{white-space:nowrap;padding:.3em .55em}.wide td:last-child,.wide th:last-child{text-align:left}.grid2 td{text-align:center;min-width:4.6em;border:2px solid #fff}.grid2 td.marked{border:2px solid #222}.grid2 table{display:inline-table}.grid2 small{color:#444}p{max-width:75ch}li{max-width:90ch}</style>\n")
	for i := range sections {
		if s := &sections[i]; len(s.Text)+len(s.Table)+len(s.Grids)+len(s.Charts)+len(s.List) > 0 {
			s.write(&b)
		}
	}
	b.WriteString("</html>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (s *Section) write(b *strings.Builder) {
	fmt.Fprintf(b, "<h2>%s</h2>\n", html.EscapeString(s.Title))
	for _, p := range s.Text {
		fmt.Fprintf(b, "<p>%s</p>\n", html.EscapeString(p))
	}
	if len(s.Table) > 0 {
		b.WriteString("<table class=\"wide\">")
		for i, row := range s.Table {
			tag, class := "td", ""
			if i == 0 {
				tag = "th"
			} else if i == s.Marked {
				class = ` class="marked"`
			}
			fmt.Fprintf(b, "<tr%s>", class)
			for j, c := range row {
				cell := tag
				if j == 0 {
					cell = "th"
				}
				fmt.Fprintf(b, "<%s>%s</%s>", cell, html.EscapeString(c), cell)
			}
			b.WriteString("</tr>\n")
		}
		b.WriteString("</table>\n")
	}
	if len(s.Grids)+len(s.Charts) > 0 {
		b.WriteString("<main>\n")
		for i := range s.Grids {
			s.Grids[i].write(b)
		}
		for i := range s.Charts {
			p := s.Charts[i].plotted()
			b.WriteString(p.svg())
		}
		b.WriteString("</main>\n")
	}
	if len(s.List) > 0 {
		b.WriteString("<ul>")
		for _, l := range s.List {
			fmt.Fprintf(b, "<li>%s</li>", html.EscapeString(l))
		}
		b.WriteString("</ul>\n")
	}
}

func (g *Grid) write(b *strings.Builder) {
	fmt.Fprintf(b, "<figure class=\"grid2\"><figcaption>%s</figcaption><table><tr><th></th><td colspan=\"%d\">%s</td></tr>\n<tr><th>%s</th>", html.EscapeString(g.Title), len(g.Columns), html.EscapeString(g.X), html.EscapeString(g.Y))
	for _, c := range g.Columns {
		fmt.Fprintf(b, "<th>%s</th>", html.EscapeString(c))
	}
	b.WriteString("</tr>\n")
	for i, row := range g.Cells {
		fmt.Fprintf(b, "<tr><th>%s</th>", html.EscapeString(g.Rows[i]))
		for _, c := range row {
			hue := 8 // red
			if c.Good {
				hue = 140 // green
			}
			class := ""
			if c.Marked {
				class = ` class="marked"`
			}
			fmt.Fprintf(b, "<td%s style=\"background:hsl(%d 55%% %.0f%%)\">%s<br><small>%s</small></td>", class, hue, 92-22*min(1, max(0, c.Value)), html.EscapeString(c.Text), html.EscapeString(c.Small))
		}
		b.WriteString("</tr>\n")
	}
	fmt.Fprintf(b, "</table><p class=\"key\">%s</p></figure>\n", html.EscapeString(g.Note))
}

// plotted returns the chart as a plot.
func (c *Chart) plotted() plotted {
	p := plotted{title: c.Title, x: c.X, y: c.Y, note: c.Note}
	for _, l := range c.Lines {
		p.all = append(p.all, series{name: l.Name, x: l.X, y: l.Y})
	}
	return p
}

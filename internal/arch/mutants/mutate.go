package main

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"
)

// mutant is one change of one source file: text[from:to] becomes with.
type mutant struct {
	file     string // relative to the module's root
	function string // "Type.Method" or "Func"; "" outside of functions
	operator string // one of operators
	line     int    // of the change, from 1
	at       string // the first changed line as it was, without indentation
	becomes  string // that line afterwards; "" if nothing is left of it
	nth      int    // counts, from 1, mutants of a file that are equal in all of the above but line
	from, to int
	with     string
}

// key identifies the mutant by content, so that it survives changes elsewhere
// in the file.
func (m *mutant) key() string {
	becomes := m.becomes
	if becomes == "" {
		becomes = "(removed)"
	}
	k := fmt.Sprintf("%s | %s | %s | %s", m.file, m.function, m.at, becomes)
	if m.nth > 1 {
		k += fmt.Sprintf(" | %d", m.nth)
	}
	return k
}

// apply returns the mutated text of the file.
func (m *mutant) apply(text []byte) []byte {
	return slices.Concat(text[:m.from], []byte(m.with), text[m.to:])
}

// Names of operators.
const (
	negateComparison = "negated comparison"
	moveBoundary     = "moved boundary"
	swapArithmetic   = "other arithmetic"
	swapLogic        = "swapped logic"
	negateCondition  = "negated condition"
	removeStatement  = "removed statement"
	changeConstant   = "constant ±1"
	flipBoolean      = "true for false"
)

var operators = []string{negateComparison, moveBoundary, swapArithmetic, swapLogic, negateCondition, removeStatement, changeConstant, flipBoolean}

// Tokens and what operators put in their place.
var (
	negations = map[token.Token]token.Token{
		token.EQL: token.NEQ, token.NEQ: token.EQL,
		token.LSS: token.GEQ, token.GEQ: token.LSS,
		token.GTR: token.LEQ, token.LEQ: token.GTR,
	}
	boundaries = map[token.Token]token.Token{
		token.LSS: token.LEQ, token.LEQ: token.LSS,
		token.GTR: token.GEQ, token.GEQ: token.GTR,
	}
	arithmetic = map[token.Token]token.Token{
		token.ADD: token.SUB, token.SUB: token.ADD, token.MUL: token.QUO, token.QUO: token.MUL, token.REM: token.MUL,
		token.SHL: token.SHR, token.SHR: token.SHL, token.AND: token.OR, token.OR: token.AND, token.XOR: token.AND, token.AND_NOT: token.AND,
		token.ADD_ASSIGN: token.SUB_ASSIGN, token.SUB_ASSIGN: token.ADD_ASSIGN, token.MUL_ASSIGN: token.QUO_ASSIGN,
		token.QUO_ASSIGN: token.MUL_ASSIGN, token.REM_ASSIGN: token.MUL_ASSIGN, token.SHL_ASSIGN: token.SHR_ASSIGN, token.SHR_ASSIGN: token.SHL_ASSIGN,
		token.AND_ASSIGN: token.OR_ASSIGN, token.OR_ASSIGN: token.AND_ASSIGN, token.XOR_ASSIGN: token.AND_ASSIGN, token.AND_NOT_ASSIGN: token.AND_ASSIGN,
		token.INC: token.DEC, token.DEC: token.INC,
	}
	logic = map[token.Token]token.Token{token.LAND: token.LOR, token.LOR: token.LAND}
)

// mutator collects the mutants of one file.
type mutator struct {
	name     string
	text     []byte
	file     *token.File
	function string
	all      []*mutant
}

// mutants returns all mutants of a source file in order of position, mutants that do not
// compile, such as a - b of strings, included.
func mutants(name string, text []byte) ([]*mutant, error) {
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, name, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	m := &mutator{name: name, text: text, file: fset.File(parsed.FileStart)}
	for _, d := range parsed.Decls {
		m.function = ""
		if f, ok := d.(*ast.FuncDecl); ok {
			m.function = functionName(f)
		}
		ast.Inspect(d, m.visit)
	}
	slices.SortStableFunc(m.all, func(a, b *mutant) int { return a.from - b.from })
	count := map[string]int{}
	for _, x := range m.all {
		k := x.key() // nth is 0 here
		count[k]++
		x.nth = count[k]
	}
	return m.all, nil
}

// functionName returns "Type.Method" or "Func".
func functionName(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return d.Name.Name
	}
	t, _, _ := strings.Cut(types.ExprString(d.Recv.List[0].Type), "[") // without type parameters
	return strings.TrimPrefix(t, "*") + "." + d.Name.Name
}

// visit adds the mutants of one node.
func (m *mutator) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.BinaryExpr:
		m.token(n.OpPos, n.Op)
	case *ast.AssignStmt:
		m.token(n.TokPos, n.Tok)
	case *ast.IncDecStmt:
		m.token(n.TokPos, n.Tok)
	case *ast.IfStmt:
		m.condition(n.Cond)
		for _, s := range n.Body.List {
			switch s.(type) {
			case *ast.ReturnStmt, *ast.BranchStmt:
				m.remove(s)
			}
		}
	case *ast.ForStmt:
		if n.Cond != nil {
			m.condition(n.Cond)
		}
	case *ast.BlockStmt:
		m.statements(n.List)
	case *ast.CaseClause:
		m.statements(n.Body)
	case *ast.CommClause:
		m.statements(n.Body)
	case *ast.BasicLit:
		if n.Kind == token.INT {
			m.integer(n)
		}
	case *ast.Ident:
		switch n.Name {
		case "true":
			m.add(flipBoolean, n.Pos(), n.End(), "false")
		case "false":
			m.add(flipBoolean, n.Pos(), n.End(), "true")
		}
	case *ast.Field: // a name of a type, parameter or member is no value; an array's length is
		if n.Type != nil {
			ast.Inspect(n.Type, m.visit)
		}
		return false
	}
	return true
}

// token adds the mutants with another operator in place of the one at pos.
func (m *mutator) token(pos token.Pos, tok token.Token) {
	for _, swap := range []struct {
		operator string
		to       map[token.Token]token.Token
	}{{negateComparison, negations}, {moveBoundary, boundaries}, {swapArithmetic, arithmetic}, {swapLogic, logic}} {
		if t, ok := swap.to[tok]; ok {
			m.add(swap.operator, pos, pos+token.Pos(len(tok.String())), t.String())
		}
	}
}

// condition adds the negation of an if's or a loop's condition. Comparisons and
// conjunctions have mutants of their own.
func (m *mutator) condition(c ast.Expr) {
	switch x := c.(type) {
	case *ast.UnaryExpr:
		if x.Op == token.NOT {
			m.add(negateCondition, x.Pos(), x.X.Pos(), "")
			return
		}
	case *ast.BinaryExpr:
		if _, ok := negations[x.Op]; ok {
			return
		}
	}
	m.add(negateCondition, c.Pos(), c.End(), "!("+m.source(c.Pos(), c.End())+")")
}

// statements adds the removal of each assignment, call, send and increment of a
// list. The right side of an assignment is kept, so that its variables are still used.
func (m *mutator) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt, *ast.IncDecStmt, *ast.SendStmt:
			m.remove(s)
		case *ast.AssignStmt:
			blank := strings.Repeat("_, ", len(s.Lhs)-1) + "_ = "
			right := m.source(s.Rhs[0].Pos(), s.End())
			switch left := m.source(s.Pos(), s.Rhs[0].Pos()); {
			case s.Tok == token.DEFINE:
			case right == "nil":
				m.remove(s)
			case left != blank:
				m.add(removeStatement, s.Pos(), s.Rhs[0].Pos(), blank)
			}
		}
	}
}

func (m *mutator) remove(s ast.Stmt) { m.add(removeStatement, s.Pos(), s.End(), "") }

// integer adds the neighbours of a literal.
func (m *mutator) integer(n *ast.BasicLit) {
	v, err := strconv.ParseInt(n.Value, 0, 64)
	if err != nil {
		return
	}
	m.add(changeConstant, n.Pos(), n.End(), strconv.FormatInt(v+1, 10))
	if v > 0 {
		m.add(changeConstant, n.Pos(), n.End(), strconv.FormatInt(v-1, 10))
	}
}

// source returns the text between two positions.
func (m *mutator) source(from, to token.Pos) string {
	return string(m.text[m.file.Offset(from):m.file.Offset(to)])
}

func (m *mutator) add(operator string, from, to token.Pos, with string) {
	x := &mutant{file: m.name, function: m.function, operator: operator, line: m.file.Line(from), from: m.file.Offset(from), to: m.file.Offset(to), with: with}
	x.at = lineAt(m.text, x.from)
	x.becomes = lineAt(x.apply(m.text), x.from)
	m.all = append(m.all, x)
}

// lineAt returns the line around an offset without the space at its ends.
func lineAt(text []byte, at int) string {
	from := bytes.LastIndexByte(text[:at], '\n') + 1
	to := len(text)
	if i := bytes.IndexByte(text[at:], '\n'); i >= 0 {
		to = at + i
	}
	return strings.TrimSpace(string(text[from:to]))
}

// order returns the mutants in the order of a draw: one of each line that has
// any, lines and mutants in an order drawn from the seed, then the second of
// each line, and so on. The order depends only on the content, so that a change
// of one line does not change the draw of the others.
func order(all []*mutant, seed uint64) []*mutant {
	drawn := slices.SortedFunc(slices.Values(all), func(a, b *mutant) int { return cmp.Compare(rank(seed, a.key()), rank(seed, b.key())) })
	type line struct {
		file string
		line int
	}
	type place struct {
		round int
		rank  uint64 // of the line, by its first mutant
	}
	last, places := map[line]place{}, map[*mutant]place{}
	for _, m := range drawn {
		l := line{m.file, m.line}
		p := last[l]
		if p.round++; p.round == 1 {
			p.rank = rank(seed, "line", m.key())
		}
		last[l], places[m] = p, p
	}
	slices.SortStableFunc(drawn, func(a, b *mutant) int {
		p, q := places[a], places[b]
		return cmp.Or(p.round-q.round, cmp.Compare(p.rank, q.rank))
	})
	return drawn
}

// rank returns a pseudo-random number of the seed and the parts.
func rank(seed uint64, parts ...string) uint64 {
	h := fnv.New64a()
	h.Write(binary.LittleEndian.AppendUint64(nil, seed))
	for _, p := range parts {
		h.Write([]byte(p))
	}
	// FNV's high bits hardly depend on the last bytes: mix them (splitmix64).
	x := h.Sum64()
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
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

var negations = map[token.Token]token.Token{
	token.EQL: token.NEQ, token.NEQ: token.EQL,
	token.LSS: token.GEQ, token.GEQ: token.LSS,
	token.GTR: token.LEQ, token.LEQ: token.GTR,
}

var boundaries = map[token.Token]token.Token{
	token.LSS: token.LEQ, token.LEQ: token.LSS,
	token.GTR: token.GEQ, token.GEQ: token.GTR,
}

var arithmetic = map[token.Token]token.Token{
	token.ADD: token.SUB, token.SUB: token.ADD, token.MUL: token.QUO, token.QUO: token.MUL, token.REM: token.MUL,
	token.SHL: token.SHR, token.SHR: token.SHL, token.AND: token.OR, token.OR: token.AND, token.XOR: token.AND, token.AND_NOT: token.AND,
	token.ADD_ASSIGN: token.SUB_ASSIGN, token.SUB_ASSIGN: token.ADD_ASSIGN, token.MUL_ASSIGN: token.QUO_ASSIGN,
	token.QUO_ASSIGN: token.MUL_ASSIGN, token.REM_ASSIGN: token.MUL_ASSIGN, token.SHL_ASSIGN: token.SHR_ASSIGN, token.SHR_ASSIGN: token.SHL_ASSIGN,
	token.AND_ASSIGN: token.OR_ASSIGN, token.OR_ASSIGN: token.AND_ASSIGN, token.XOR_ASSIGN: token.AND_ASSIGN, token.AND_NOT_ASSIGN: token.AND_ASSIGN,
	token.INC: token.DEC, token.DEC: token.INC,
}

var logic = map[token.Token]token.Token{token.LAND: token.LOR, token.LOR: token.LAND}

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
		switch d := d.(type) {
		case *ast.FuncDecl:
			m.function = functionName(d)
		case *ast.GenDecl:
			if d.Tok == token.IMPORT {
				continue
			}
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
	t := d.Recv.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.Name + "." + d.Name.Name
		default:
			return d.Name.Name
		}
	}
}

// visit adds the mutants of one node.
func (m *mutator) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.BinaryExpr:
		m.token(negateComparison, n.OpPos, n.Op, negations)
		m.token(moveBoundary, n.OpPos, n.Op, boundaries)
		m.token(swapArithmetic, n.OpPos, n.Op, arithmetic)
		m.token(swapLogic, n.OpPos, n.Op, logic)
	case *ast.AssignStmt:
		m.token(swapArithmetic, n.TokPos, n.Tok, arithmetic)
	case *ast.IncDecStmt:
		m.token(swapArithmetic, n.TokPos, n.Tok, arithmetic)
	case *ast.IfStmt:
		m.condition(n.Cond)
		for _, s := range n.Body.List {
			switch s.(type) {
			case *ast.ReturnStmt, *ast.BranchStmt:
				m.add(removeStatement, s.Pos(), s.End(), "")
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

// token adds a mutant with another operator in place of one at pos.
func (m *mutator) token(operator string, pos token.Pos, tok token.Token, to map[token.Token]token.Token) {
	if t, ok := to[tok]; ok {
		m.add(operator, pos, pos+token.Pos(len(tok.String())), t.String())
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
	m.add(negateCondition, c.Pos(), c.End(), "!("+string(m.text[m.offset(c.Pos()):m.offset(c.End())])+")")
}

// statements adds the removal of each assignment, call, send and increment of a
// list. The right side of an assignment is kept, so that its variables are still used.
func (m *mutator) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt, *ast.IncDecStmt, *ast.SendStmt:
			m.add(removeStatement, s.Pos(), s.End(), "")
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
			blank := strings.TrimSuffix(strings.Repeat("_, ", len(s.Lhs)), ", ")
			if x, ok := s.Rhs[0].(*ast.Ident); ok && x.Name == "nil" && len(s.Rhs) == 1 {
				m.add(removeStatement, s.Pos(), s.End(), "")
				continue
			}
			if !blanks(s.Lhs) {
				m.add(removeStatement, s.Pos(), s.Rhs[0].Pos(), blank+" = ")
			}
		}
	}
}

// blanks reports whether all expressions are the blank identifier.
func blanks(list []ast.Expr) bool {
	return !slices.ContainsFunc(list, func(e ast.Expr) bool {
		x, ok := e.(*ast.Ident)
		return !ok || x.Name != "_"
	})
}

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

func (m *mutator) offset(p token.Pos) int { return m.file.Offset(p) }

func (m *mutator) add(operator string, from, to token.Pos, with string) {
	x := &mutant{file: m.name, function: m.function, operator: operator, line: m.file.Line(from), from: m.offset(from), to: m.offset(to), with: with}
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
	type line struct {
		file string
		line int
	}
	lines := map[line][]*mutant{}
	for _, m := range all {
		l := line{m.file, m.line}
		lines[l] = append(lines[l], m)
	}
	type drawn struct {
		m     *mutant
		round int
		rank  uint64
	}
	var draws []drawn
	for _, l := range lines {
		slices.SortFunc(l, func(a, b *mutant) int { return compare(rank(seed, a.key()), rank(seed, b.key())) })
		for i, m := range l {
			draws = append(draws, drawn{m, i, rank(seed, "line", l[0].key())})
		}
	}
	slices.SortFunc(draws, func(a, b drawn) int {
		if a.round != b.round {
			return a.round - b.round
		}
		return compare(a.rank, b.rank)
	})
	sorted := make([]*mutant, len(draws))
	for i, d := range draws {
		sorted[i] = d.m
	}
	return sorted
}

func compare(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
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

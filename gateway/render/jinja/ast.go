package jinja

// expr is an expression. Its eval is in eval.go.
type expr interface {
	eval(r *run) Value
}

type (
	constExpr struct{ v Value }
	nameExpr  struct {
		name string
		line int
	}
	attrExpr struct { // x.name
		x    expr
		name string
		line int
	}
	itemExpr struct { // x[index]
		x, index expr
		line     int
	}
	sliceExpr struct { // x[start:stop:step], absent parts nil
		x                 expr
		start, stop, step expr
		line              int
	}
	listExpr  struct{ elems []expr }
	tupleExpr struct{ elems []expr }
	dictExpr  struct {
		keys, vals []expr
		line       int
	}
	callExpr struct {
		fn   expr
		args argExprs
		line int
	}
	applyExpr struct { // x|name(args), or x is name(args)
		x    expr   // nil in a filter block: the block's text
		kind string // filter or test
		name string
		def  *builtin // nil: unknown, an error when it is applied
		args argExprs
		line int
	}
	notExpr   struct{ x expr }
	unaryExpr struct {
		op   string // + or -
		x    expr
		line int
	}
	binaryExpr struct {
		op   string // + - * / // % **
		l, r expr
		line int
	}
	logicExpr struct { // l and r, l or r
		or   bool
		l, r expr
	}
	concatExpr struct { // a ~ b ~ c
		elems []expr
		line  int
	}
	condExpr struct { // then if cond else other
		cond, then, other expr // other may be nil
	}
	compareExpr struct { // first op operand op operand …
		first    expr
		ops      []string // == != < <= > >= in notin
		operands []expr
		line     int
	}
)

// argExprs are the arguments of a call, a filter or a test.
type argExprs struct {
	pos   []expr
	names []string
	named []expr // one for each of names
	star  expr   // *args, or nil
	stars expr   // **kwargs, or nil
}

// stmt is a statement. Its exec is in exec.go.
type stmt interface {
	exec(r *run) flow
}

type (
	dataStmt   struct{ text string }
	outputStmt struct {
		x    expr
		line int
	}
	ifStmt struct {
		conds  []expr
		bodies [][]stmt // one for each of conds
		other  []stmt
	}
	forStmt struct {
		target target
		in     expr
		filter expr // or nil
		body   []stmt
		other  []stmt
		line   int
	}
	setStmt struct {
		target target
		x      expr
		line   int
	}
	setBlockStmt struct { // {% set name %}…{% endset %}
		target target
		filter expr // a chain of filters, or nil
		body   []stmt
		line   int
	}
	macroStmt struct {
		name     string
		params   []string
		defaults []expr // of the last params
		body     []stmt
		line     int
		// What Jinja passes only to macros that mention it.
		usesVarargs, usesKwargs, usesCaller bool
	}
	callStmt struct { // {% call(params) x(…) %}…{% endcall %}
		caller *macroStmt
		call   *callExpr
		line   int
	}
	filterStmt struct { // {% filter f %}…{% endfilter %}
		filter expr
		body   []stmt
		line   int
	}
	withStmt struct { // also {% generation %}…{% endgeneration %}, without targets
		targets []target
		values  []expr
		body    []stmt
		line    int
	}
	flowStmt flow // break, continue
)

// target is what set, for and with assign to.
type target struct {
	name  string   // a variable, or the namespace of attr
	attr  string   // of a namespace, or empty
	elems []target // a tuple, when name is empty
}

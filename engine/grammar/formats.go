package grammar

// stringFormats are the formats of strings that are enforced, as regular expressions. All others
// are annotations, as draft 2020-12 demands.
var stringFormats = map[string]string{
	"date":      dateFormat,
	"time":      timeFormat,
	"date-time": dateFormat + `[Tt]` + timeFormat,
	"duration":  `P(?:\d+W|` + durationDate + `(?:T` + durationTime + `)?|T` + durationTime + `)`,
	"email":     `(?:` + atext + `{1,64}|` + atext + `(?:\.?` + atext + `){0,31})@` + hostnameFormat,
	"hostname":  hostnameFormat,
	"ipv4":      ipv4Format,
	"ipv6":      ipv6Format,
	"uuid":      `[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}`,
	"uri":       uriFormat,

	"uri-reference": `(?:` + uriFormat + `|` + relativeFormat + `)`,
}

// RFC 3339, with the days of each month. 29 February is a day of leap years only.
const (
	dateFormat = `(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))|` +
		`(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)`
	timeFormat = `(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d))`
)

// RFC 3339, appendix A.
const (
	durationTime = `(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)`
	durationDate = `(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)`
)

// RFC 5321: a local part has at most 64 characters. With dots, it is here of at most 32 others.
const atext = `[!#-'*+\-/-9=?A-Z^-~]`

// RFC 1123: labels of letters, digits and inner hyphens, at most 63 characters each and 253 with
// their dots. More than three labels are here of at most 14 characters each, and at most 16.
const (
	hostnameFormat = `(?:` + label + `(?:\.` + label + `){0,2}|` + shortLabel + `(?:\.` + shortLabel + `){3,15})`
	label          = `[0-9A-Za-z](?:[0-9A-Za-z\-]{0,61}[0-9A-Za-z])?`
	shortLabel     = `[0-9A-Za-z](?:[0-9A-Za-z\-]{0,12}[0-9A-Za-z])?`
)

const (
	octet      = `(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)`
	ipv4Format = octet + `(?:\.` + octet + `){3}`
	h16        = `[0-9A-Fa-f]{1,4}`
	ls32       = `(?:` + h16 + `:` + h16 + `|` + ipv4Format + `)`
	// RFC 3986: one line for each place of the double colon.
	ipv6Format = `(?:(?:` + h16 + `:){6}` + ls32 +
		`|::(?:` + h16 + `:){5}` + ls32 +
		`|(?:` + h16 + `)?::(?:` + h16 + `:){4}` + ls32 +
		`|(?:(?:` + h16 + `:){0,1}` + h16 + `)?::(?:` + h16 + `:){3}` + ls32 +
		`|(?:(?:` + h16 + `:){0,2}` + h16 + `)?::(?:` + h16 + `:){2}` + ls32 +
		`|(?:(?:` + h16 + `:){0,3}` + h16 + `)?::` + h16 + `:` + ls32 +
		`|(?:(?:` + h16 + `:){0,4}` + h16 + `)?::` + ls32 +
		`|(?:(?:` + h16 + `:){0,5}` + h16 + `)?::` + h16 +
		`|(?:(?:` + h16 + `:){0,6}` + h16 + `)?::)`
)

// RFC 3986.
const (
	pchar     = `(?:[0-9A-Za-z\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})`
	userinfo  = `(?:[0-9A-Za-z\-._~!$&'()*+,;=:]|%[0-9A-Fa-f]{2})*`
	regName   = `(?:[0-9A-Za-z\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*`
	authority = `(?:` + userinfo + `@)?(?:\[` + ipv6Format + `\]|` + regName + `)(?::\d*)?`
	uriPath   = `(?:` + pchar + `|/)*`
	noColon   = `(?:[0-9A-Za-z\-._~!$&'()*+,;=@]|%[0-9A-Fa-f]{2})`
	uriTail   = `(?:\?(?:` + pchar + `|[/?])*)?(?:#(?:` + pchar + `|[/?])*)?`

	relativeFormat = `(?://` + authority + `(?:/` + uriPath + `)?|/(?:` + pchar + `+(?:/` + uriPath + `)?)?|` + noColon + `+(?:/` + uriPath + `)?|)` + uriTail
	uriFormat      = `[A-Za-z][0-9A-Za-z+\-.]*:(?://` + authority + `(?:/` + uriPath + `)?|/(?:` + pchar + `+` + `(?:/` + uriPath + `)?)?|(?:` + pchar + `+(?:/` + uriPath + `)?)?)` +
		uriTail
)

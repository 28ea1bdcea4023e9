//! Names in certificates.

use rcgen::DnType;

use super::{ADMITTED, Case, case};
use crate::der::{DNS, EMAIL, IP, Name, OTHER_NAME, URI, element};
use crate::pki::{Pki, san};
use crate::support::CLIENT;

const BAD: &str = "bad_spiffe_id";
const UNTRUSTED: &str = "untrusted_domain";
const MANY: &str = "many_uri_sans";
const NO_URI: &str = "no_uri_san";

const FOREIGN: &str = "spiffe://foreign.example/ns/shop/sa/checkout";

/// Single URIs, with their results.
const URIS: &[(&str, &str, &str)] = &[
    ("the usual form", ADMITTED, CLIENT),
    ("marks in the path", ADMITTED, "spiffe://west.local/ns/a-b_c.d/sa/E.9"),
    ("another domain", UNTRUSTED, FOREIGN),
    ("an empty URI", BAD, ""),
    ("https", BAD, "https://west.local/ns/shop/sa/checkout"),
    ("the scheme in upper case", BAD, "SPIFFE://west.local/ns/shop/sa/checkout"),
    ("no scheme", BAD, "//west.local/ns/shop/sa/checkout"),
    ("a space before the scheme", BAD, " spiffe://west.local/ns/shop/sa/checkout"),
    ("a longer scheme", BAD, "spiffes://west.local/ns/shop/sa/checkout"),
    ("one slash after the scheme", BAD, "spiffe:/west.local/ns/shop/sa/checkout"),
    ("no path", BAD, "spiffe://west.local"),
    ("a path of one slash", BAD, "spiffe://west.local/"),
    ("a path of another form", BAD, "spiffe://west.local/host/vm-1"),
    ("a path in another order", BAD, "spiffe://west.local/sa/checkout/ns/shop"),
    ("a path without account", BAD, "spiffe://west.local/ns/shop/sa"),
    ("a path of one segment too many", BAD, "spiffe://west.local/ns/shop/sa/checkout/x"),
    ("a prefix before the path", BAD, "spiffe://west.local/x/ns/shop/sa/checkout"),
    ("an empty namespace", BAD, "spiffe://west.local/ns//sa/checkout"),
    ("// before the path", BAD, "spiffe://west.local//ns/shop/sa/checkout"),
    (".. as namespace", BAD, "spiffe://west.local/ns/../sa/checkout"),
    (".. beside the path", BAD, "spiffe://west.local/ns/x/../shop/sa/checkout"),
    (". in the path", BAD, "spiffe://west.local/ns/./sa/checkout"),
    ("a trailing slash", BAD, "spiffe://west.local/ns/shop/sa/checkout/"),
    ("a query", BAD, "spiffe://west.local/ns/shop/sa/checkout?x=1"),
    ("a fragment", BAD, "spiffe://west.local/ns/shop/sa/checkout#x"),
    ("percent-encoding in the path", BAD, "spiffe://west.local/ns/shop/sa/check%6fut"),
    ("an encoded slash", BAD, "spiffe://west.local/ns/shop%2fsa/sa/checkout"),
    ("a space in the path", BAD, "spiffe://west.local/ns/shop/sa/check out"),
    ("a backslash", BAD, "spiffe://west.local/ns/shop\\sa/checkout"),
    ("a line feed at the end", BAD, "spiffe://west.local/ns/shop/sa/checkout\n"),
    ("a star as account", BAD, "spiffe://west.local/ns/shop/sa/*"),
    ("non-ASCII in the path", BAD, "spiffe://west.local/ns/shöp/sa/checkout"),
    ("NUL at the end", BAD, "spiffe://west.local/ns/shop/sa/checkout\0"),
    ("NUL inside the path", BAD, "spiffe://west.local/ns/shop/sa/checkout\0/x"),
    ("NUL after the domain", BAD, "spiffe://west.local\0.evil.example/ns/shop/sa/checkout"),
    ("NUL and the domain", BAD, "spiffe://evil.example\0west.local/ns/shop/sa/checkout"),
    ("the domain in upper case", BAD, "spiffe://WEST.LOCAL/ns/shop/sa/checkout"),
    ("one letter in upper case", BAD, "spiffe://West.local/ns/shop/sa/checkout"),
    ("no domain", BAD, "spiffe:///ns/shop/sa/checkout"),
    ("userinfo", BAD, "spiffe://user@west.local/ns/shop/sa/checkout"),
    ("the domain as userinfo", BAD, "spiffe://west.local@evil.example/ns/shop/sa/checkout"),
    ("a port", BAD, "spiffe://west.local:443/ns/shop/sa/checkout"),
    ("an empty port", BAD, "spiffe://west.local:/ns/shop/sa/checkout"),
    ("a wildcard", BAD, "spiffe://*/ns/shop/sa/checkout"),
    ("a wildcard below", BAD, "spiffe://*.local/ns/shop/sa/checkout"),
    ("percent-encoding in the domain", BAD, "spiffe://west%2elocal/ns/shop/sa/checkout"),
    ("a Cyrillic е", BAD, "spiffe://wеst.local/ns/shop/sa/checkout"),
    ("an IPv6 address", BAD, "spiffe://[::1]/ns/shop/sa/checkout"),
    ("an IPv4 address", UNTRUSTED, "spiffe://127.0.0.1/ns/shop/sa/checkout"),
    ("its punycode", UNTRUSTED, "spiffe://xn--wst-qdd.local/ns/shop/sa/checkout"),
    ("the domain as prefix", UNTRUSTED, "spiffe://west.localhost/ns/shop/sa/checkout"),
    ("the domain as first labels", UNTRUSTED, "spiffe://west.local.evil/ns/shop/sa/checkout"),
    ("the domain as suffix", UNTRUSTED, "spiffe://evilwest.local/ns/shop/sa/checkout"),
    ("a sub-domain", UNTRUSTED, "spiffe://a.west.local/ns/shop/sa/checkout"),
    ("the super-domain", UNTRUSTED, "spiffe://local/ns/shop/sa/checkout"),
    ("a trailing dot", UNTRUSTED, "spiffe://west.local./ns/shop/sa/checkout"),
    ("a leading dot", UNTRUSTED, "spiffe://.west.local/ns/shop/sa/checkout"),
    ("two dots", UNTRUSTED, "spiffe://west..local/ns/shop/sa/checkout"),
    ("a letter for the dot", UNTRUSTED, "spiffe://westxlocal/ns/shop/sa/checkout"),
    ("the account as the domain", UNTRUSTED, "spiffe://checkout/ns/west.local/sa/checkout"),
];

/// Several names. A SAN of another type beside the one URI is allowed: by X509-SVID section 2, an
/// SVID may hold other SAN types, and must not hold a second URI, SPIFFE ID or not.
const SEVERAL: &[(&str, &str, &[Name<'_>])] = &[
    ("no SAN", NO_URI, &[]),
    ("a DNS name only", NO_URI, &[(DNS, b"checkout.shop.svc")]),
    ("the id as a DNS name", NO_URI, &[(DNS, CLIENT.as_bytes())]),
    ("the id as an e-mail address", NO_URI, &[(EMAIL, CLIENT.as_bytes())]),
    ("an IP address only", NO_URI, &[(IP, &[127, 0, 0, 1])]),
    ("a DNS name after it", ADMITTED, &[ID, (DNS, b"west.local")]),
    ("a DNS name before it", ADMITTED, &[(DNS, b"west.local"), ID]),
    ("other types around it", ADMITTED, &[(EMAIL, b"a@b.example"), ID, (IP, &[127, 0, 0, 1])]),
    ("a good one, then a stranger", MANY, &[ID, OTHER]),
    ("a stranger, then a good one", MANY, &[OTHER, ID]),
    ("a good one twice", MANY, &[ID, ID]),
    ("a good one, then https", MANY, &[ID, HTTPS]),
    ("https, then a good one", MANY, &[HTTPS, ID]),
    ("a good one, then an empty URI", MANY, &[ID, (URI, b"")]),
    ("a good one, then one that is not ASCII", MANY, &[ID, (URI, b"\xff\xfe")]),
    ("one that is not ASCII, then a good one", MANY, &[(URI, b"\xff\xfe"), ID]),
    ("two accounts of the domain", MANY, &[ID, (URI, b"spiffe://west.local/ns/a/sa/b")]),
    ("a DNS name between two", MANY, &[ID, (DNS, b"west.local"), OTHER]),
    ("three", MANY, &[OTHER, ID, HTTPS]),
    ("one that is no UTF-8", BAD, &[(URI, b"spiffe://west.local/ns/shop/sa/\xff")]),
];

const ID: Name<'static> = (URI, CLIENT.as_bytes());
const OTHER: Name<'static> = (URI, FOREIGN.as_bytes());
const HTTPS: Name<'static> = (URI, b"https://west.local/ns/shop/sa/checkout");

pub fn cases(pki: &Pki) -> Vec<Case> {
    let west = &pki.west;
    let uri = |uri: &str| west.named(&[(URI, uri.as_bytes())]);
    let uris = URIS.iter().map(|&(name, expected, text)| case(name, expected, uri(text)));
    let several =
        SEVERAL.iter().map(|&(name, expected, names)| case(name, expected, west.named(names)));
    let mut cases: Vec<_> = uris.chain(several).collect();
    let long = |bytes: usize| {
        let rest = bytes - "spiffe://west.local/ns//sa/x".len();
        uri(&format!("spiffe://west.local/ns/{}/sa/x", "n".repeat(rest)))
    };
    let domain = |bytes: usize| uri(&format!("spiffe://{}/ns/shop/sa/x", "d".repeat(bytes)));
    // CVE-2025-66220: an OTHERNAME of type 1.2.3 with the UTF-8 string "a", NUL, "b".
    let text = element(0xa0, &element(12, b"a\0b"));
    let other_name = [&[6, 2, 0x2a, 3], &*text].concat();
    cases.extend([
        case("2,048 bytes", ADMITTED, long(2048)),
        case("2,049 bytes", BAD, long(2049)),
        case("60,000 bytes", BAD, long(60_000)),
        case("a domain of 255 bytes", UNTRUSTED, domain(255)),
        case("a domain of 256 bytes", BAD, domain(256)),
        case(
            "an OTHERNAME with NUL beside it",
            ADMITTED,
            west.named(&[(OTHER_NAME, &other_name), ID]),
        ),
        case("an OTHERNAME only", NO_URI, west.named(&[(OTHER_NAME, &other_name)])),
        case(
            "the id as common name",
            NO_URI,
            west.named_but(&[], |params| {
                params.distinguished_name.push(DnType::CommonName, CLIENT);
            }),
        ),
        case(
            "another id as common name",
            ADMITTED,
            west.client_but(|params| {
                params.distinguished_name.push(DnType::CommonName, FOREIGN);
            }),
        ),
        case(
            "two SAN extensions",
            "bad_encoding",
            west.client_but(|params| {
                params.custom_extensions.push(san(&[OTHER]));
            }),
        ),
        case(
            "a SAN extension that is not critical",
            ADMITTED,
            west.client_but(|params| {
                params.custom_extensions[0].set_criticality(false);
            }),
        ),
    ]);
    cases
}

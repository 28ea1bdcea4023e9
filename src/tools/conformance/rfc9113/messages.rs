//! Sections 4.3, 8.1 to 8.3 and 8.5: header blocks, malformed requests, CONNECT.

use anyhow::ensure;
use tokio::time::error::Elapsed;

use crate::tools::conformance::case::{Case, Group, case, frames, script};
use crate::tools::conformance::outcome::Outcome::{Connection, Status, Stream};
use crate::tools::conformance::outcome::{COMPRESSION_ERROR, Outcome, PROTOCOL_ERROR, State, data};
use crate::tools::conformance::peer::{METHOD, Names, Peer, Target};
use crate::tools::conformance::raw;

pub(super) fn cases(to: &Names) -> Vec<Case> {
    let parts = [
        section_4_3_header_blocks(to),
        section_8_2_fields(to),
        section_8_3_pseudo_header_fields(to),
        section_8_5_connect(to),
        sections_8_1_and_8_5_a_connected_stream(to),
        vec![script(Group::Http2, "4.3", "table after a malformed request", table_is_kept)],
    ];
    parts.into_iter().flatten().collect()
}

fn line(section: &'static str, name: &str, frames: Vec<u8>, expected: &[Outcome]) -> Case {
    case(section, name, State::Idle, frames, expected)
}

fn section_4_3_header_blocks(to: &Names) -> Vec<Case> {
    let block = |name: &str, octets: &[u8], expected: &[Outcome]| {
        let headers = raw::frame(raw::HEADERS, raw::END_HEADERS, 1, octets);
        line("4.3", name, headers, expected)
    };
    let compression = [Connection(COMPRESSION_ERROR)];
    let connect = raw::block(&to.connect());
    let after_update = |update: &[u8]| [update, &connect].concat();
    let status = [Status(200)];
    vec![
        block("index 0", &[0x80], &compression),
        block("index above the tables", &[0xbe], &compression),
        block("integer of six octets", &[0xff, 0x80, 0x80, 0x80, 0x80, 0], &compression),
        block("truncated string", &[0x01, 9, b'a'], &compression),
        block("truncated block", &[0x41], &compression),
        block("EOS in a string", &[0x01, 0x84, 0xff, 0xff, 0xff, 0xff], &compression),
        block("padding of eight bits", &[0x01, 0x81, 0xff], &compression),
        block("table size update to 0", &after_update(&[0x20]), &status),
        block("table size update to 4,096", &after_update(&[0x3f, 0xe1, 0x1f]), &status),
        block("table size update to 4,097", &after_update(&[0x3f, 0xe2, 0x1f]), &compression),
        block("table size update after a field", &[&connect[..], &[0x20]].concat(), &compression),
    ]
}

fn section_8_2_fields(to: &Names) -> Vec<Case> {
    let malformed = [Stream(PROTOCOL_ERROR)];
    let with = |name: &str, value: &[u8]| raw::headers(1, &[METHOD, to.authority(), (name, value)]);
    let line = |name: &str, frames, expected: &[Outcome]| line("8.2", name, frames, expected);
    let opened = [Status(200)];
    // CONNECT has no content (RFC 9110 section 9.3.6).
    let either = [Status(200), Stream(PROTOCOL_ERROR)];
    let length = |name: &str, values: &[&[u8]], expected: &[Outcome]| {
        let values = values.iter().map(|value| ("content-length", *value));
        let fields: Vec<_> = [METHOD, to.authority()].into_iter().chain(values).collect();
        line(name, raw::headers(1, &fields), expected)
    };
    vec![
        line("upper case in a name", with("Baggage", b"a"), &malformed),
        line("space in a name", with("a b", b"a"), &malformed),
        line("colon in a name", with("a:b", b"a"), &malformed),
        line("NUL in a name", with("a\0", b"a"), &malformed),
        line("DEL in a name", with("a\x7f", b"a"), &malformed),
        line("an octet above 0x7f in a name", with("\u{e9}", b"a"), &malformed),
        line("empty name", with("", b"a"), &malformed),
        line("NUL in a value", with("a", b"a\0b"), &malformed),
        line("LF in a value", with("a", b"a\nb"), &malformed),
        line("CR in a value", with("a", b"a\rb"), &malformed),
        line("space before a value", with("a", b" b"), &malformed),
        line("tab after a value", with("a", b"b\t"), &malformed),
        line("octets above 0x7f in a value", with("a", b"\x80\xff"), &opened),
        line("empty value", with("a", b""), &opened),
        line("connection", with("connection", b"close"), &malformed),
        line("proxy-connection", with("proxy-connection", b"close"), &malformed),
        line("keep-alive", with("keep-alive", b"1"), &malformed),
        line("transfer-encoding", with("transfer-encoding", b"chunked"), &malformed),
        line("upgrade", with("upgrade", b"h2c"), &malformed),
        line("te of trailers", with("te", b"trailers"), &opened),
        line("te of gzip", with("te", b"gzip"), &malformed),
        line("unknown field", with("x-unknown", b"a"), &opened),
        line("te of trailers and gzip", with("te", b"trailers, gzip"), &malformed),
        line("empty te", with("te", b""), &malformed),
        length("content-length without a number", &[b"x"], &malformed),
        length("content-length of 0", &[b"0"], &opened),
        length("content-length of 64 bits", &[b"18446744073709551615"], &either),
        length("content-length of more", &[b"18446744073709551616"], &malformed),
        length("empty content-length", &[b""], &malformed),
        length("content-length with +", &[b"+1"], &malformed),
        length("content-length with -", &[b"-1"], &malformed),
        length("list of content-length", &[b"1, 1"], &malformed),
        length("the same content-length twice", &[b"7", b"7"], &either),
        length("two content-length", &[b"7", b"8"], &malformed),
    ]
}

const SCHEME: (&str, &[u8]) = (":scheme", b"https");
const PATH: (&str, &[u8]) = (":path", b"/");
const GET: (&str, &[u8]) = (":method", b"GET");

fn request(
    section: &'static str,
    name: &str,
    fields: &[(&str, &[u8])],
    expected: &[Outcome],
) -> Case {
    line(section, name, raw::headers(1, fields), expected)
}

fn section_8_3_pseudo_header_fields(to: &Names) -> Vec<Case> {
    let malformed = |name: &str, fields: &[(&str, &[u8])]| {
        request("8.3", name, fields, &[Stream(PROTOCOL_ERROR)])
    };
    let other: (&str, &[u8]) = ("a", b"b");
    let empty: (&str, &[u8]) = (":path", b"");
    let unknown: (&str, &[u8]) = (":unknown", b"a");
    let rejected = [Status(405)];
    vec![
        request("8.3.1", "GET", &[GET, SCHEME, PATH, to.authority()], &rejected),
        request("8.3.1", "no authority", &[GET, SCHEME, PATH], &rejected),
        request("8.3.1", "GET in another order", &[PATH, to.authority(), SCHEME, GET], &rejected),
        request(
            "8.3.1",
            "CONNECT in another order",
            &[to.authority(), METHOD, other],
            &[Status(200)],
        ),
        malformed("unknown", &[METHOD, to.authority(), unknown]),
        malformed(":status", &[METHOD, to.authority(), (":status", b"200")]),
        malformed(":method twice", &[METHOD, METHOD, to.authority()]),
        malformed(":authority twice", &[METHOD, to.authority(), to.authority()]),
        malformed("after another field", &[METHOD, other, to.authority()]),
        malformed("GET without :scheme", &[GET, PATH, to.authority()]),
        malformed("GET without :path", &[GET, SCHEME, to.authority()]),
        malformed("GET with an empty :path", &[GET, SCHEME, empty]),
        malformed("no :method", &[SCHEME, PATH, to.authority()]),
        malformed("an empty list", &[]),
        malformed("nothing but :authority", &[to.authority()]),
        malformed("GET without :scheme and :authority", &[GET, PATH]),
        malformed("GET without :path and :authority", &[GET, SCHEME]),
        malformed("space in :path", &[GET, SCHEME, (":path", b"/a b")]),
        malformed("invalid :scheme", &[GET, (":scheme", b"1:"), PATH]),
        malformed("empty :method", &[(":method", b""), SCHEME, PATH]),
        malformed("space in :method", &[(":method", b"A B"), SCHEME, PATH]),
        malformed("without a name", &[METHOD, to.authority(), (":", b"")]),
        malformed(":scheme twice", &[GET, SCHEME, SCHEME, PATH]),
        malformed(":path twice", &[GET, SCHEME, PATH, PATH]),
        malformed("all after another field", &[other, METHOD, to.authority()]),
    ]
}

fn section_8_5_connect(to: &Names) -> Vec<Case> {
    let connect = |name: &str, fields: &[(&str, &[u8])], expected| {
        let fields = [&[METHOD], fields].concat();
        request("8.5", name, &fields, &[expected])
    };
    let malformed = || Stream(PROTOCOL_ERROR);
    let empty: (&str, &[u8]) = (":authority", b"");
    let invalid: (&str, &[u8]) = (":authority", b"echo global:80");
    let portless: (&str, &[u8]) = (":authority", b"echo.global");
    let long = format!("{}:80", "a".repeat(253));
    let authority = |authority: &'static [u8], expected| {
        let name = format!(":authority of {}", authority.escape_ascii());
        connect(&name, &[(":authority", authority)], expected)
    };
    let protocol: (&str, &[u8]) = (":protocol", b"websocket");
    let extended = [protocol, SCHEME, PATH, to.authority()];
    vec![
        connect("no :authority", &[], malformed()),
        connect("empty :authority", &[empty], malformed()),
        connect("invalid :authority", &[invalid], malformed()),
        connect(":authority without port", &[portless], Status(400)),
        connect(":authority that is unknown", &to.rejected()[1..], Status(503)),
        connect(":scheme", &[to.authority(), SCHEME], malformed()),
        connect(":path", &[to.authority(), PATH], malformed()),
        connect(":scheme and :path", &[to.authority(), SCHEME, PATH], malformed()),
        connect(":protocol", &extended, malformed()),
        connect("long :authority", &[(":authority", long.as_bytes())], Status(400)),
        authority(b"[2001:db8::1]:80", Status(503)),
        authority(b"user@echo.app:80", Status(400)),
        authority(b"echo.app,other:80", Status(400)),
        authority(b"[fe80::1%25eth0]:80", Status(400)),
        authority(b":80", Status(400)),
        authority(b"echo.app/x:80", malformed()),
        authority(b"echo.app:80:90", malformed()),
        authority(b"\xffcho.app:80", malformed()),
        authority(b"\xc3\xa9cho.app:80", malformed()),
    ]
}

fn sections_8_1_and_8_5_a_connected_stream(to: &Names) -> Vec<Case> {
    let open =
        |name: &str, frames, expected: &[Outcome]| case("8.5", name, State::Open, frames, expected);
    let malformed = [Stream(PROTOCOL_ERROR)];
    let end = raw::END_STREAM | raw::END_HEADERS;
    let headers =
        |flags, fields: &[(&str, &[u8])]| raw::frame(raw::HEADERS, flags, 1, &raw::block(fields));
    let block = raw::block(&[("a", b"b")]);
    let (first, rest) = block.split_at(2);
    let large = raw::frame(raw::HEADERS, end, 1, &[0x90; 300]);
    vec![
        open("DATA", raw::frame(raw::DATA, 0, 1, b"tunnel"), &[data(b"tunnel")]),
        open(
            "DATA with END_STREAM",
            raw::frame(raw::DATA, raw::END_STREAM, 1, b"x"),
            &[data(b"x")],
        ),
        open("trailers", headers(end, &[("a", b"b")]), &malformed),
        open("empty trailers", headers(end, &[]), &malformed),
        open(
            "trailers of two fragments",
            frames([
                raw::frame(raw::HEADERS, raw::END_STREAM, 1, first),
                raw::frame(raw::CONTINUATION, raw::END_HEADERS, 1, rest),
            ]),
            &malformed,
        ),
        open("trailers with a pseudo-header field", headers(end, &to.connect()), &malformed),
        open("trailers without END_STREAM", headers(raw::END_HEADERS, &[("a", b"b")]), &malformed),
        open("large trailers", large, &malformed),
        open(
            "trailers with invalid HPACK",
            raw::frame(raw::HEADERS, end, 1, &[0x80]),
            &[Connection(COMPRESSION_ERROR)],
        ),
    ]
}

/// Checks section 4.3: a header block changes the table even if its request is malformed.
async fn table_is_kept(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    let (_, authority) = to.names.authority();
    let length = u8::try_from(authority.len()).unwrap_or(u8::MAX);
    ensure!(length < 127, "the authority is too long for this case");
    // A literal with incremental indexing whose name is entry 1 of the static table.
    let insertion = [&[0x41, length][..], authority].concat();
    let block = |stream, block: &[u8]| raw::frame(raw::HEADERS, raw::END_HEADERS, stream, block);
    peer.write(&block(1, &insertion)).await?;
    let rejects = |kind| matches!(kind, raw::RST_STREAM | raw::HEADERS);
    match peer.until(|frame| frame.stream == 1 && rejects(frame.kind)).await {
        Err(error) if error.is::<Elapsed>() => return Err(error),
        // The gateway has ended the connection, as section 5.4 permits.
        Err(_) => return Ok(()),
        Ok(_) => {}
    }
    let indexed = [&[2, 7][..], METHOD.1, &[0x80 | 62]].concat();
    peer.write(&block(3, &indexed)).await?;
    let answer = peer.until(|frame| frame.stream == 3 && rejects(frame.kind)).await?;
    ensure!(answer.kind == raw::HEADERS, "the inserted authority was not found");
    let status = peer.status(&answer)?;
    ensure!(status == 200, "status {status}");
    Ok(())
}

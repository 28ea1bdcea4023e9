//! Answer to one query (RFC 1035, EDNS by RFC 6891).

use std::net::IpAddr;

use hickory_resolver::proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::{DNSClass, Record, RecordType};

use super::names::{Known, Names};

/// Time in seconds for which clients may keep an answer: a reload can change it.
const TTL: u32 = 30;
/// Limit of an answer over UDP, which every path carries unfragmented (DNS flag day 2020).
pub(super) const UDP_BYTES_MAX: u16 = 1232;
/// Bytes of a header.
const HEADER_BYTES: usize = 12;

/// Transport of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
}

/// Returns the answer; none to a message that is not a query, which might be an answer to us.
pub(super) fn answer(names: &Names, bytes: &[u8], transport: Transport) -> Option<Vec<u8>> {
    let Ok(query) = Message::from_vec(bytes) else {
        let [first, second, flags, ..] = *bytes else {
            return None;
        };
        let is_query = flags & 0x80 == 0 && bytes.len() >= HEADER_BYTES;
        let id = u16::from_be_bytes([first, second]);
        let error = || Message::error_msg(id, OpCode::Query, ResponseCode::FormErr);
        return is_query.then(error)?.to_vec().ok();
    };
    let metadata = &query.metadata;
    if metadata.message_type != MessageType::Query {
        return None;
    }
    let mut message = Message::response(metadata.id, metadata.op_code);
    message.metadata.recursion_desired = metadata.recursion_desired;
    message.metadata.response_code = match (&query.queries[..], metadata.op_code) {
        (_, op_code) if op_code != OpCode::Query => ResponseCode::NotImp,
        ([question], _) => {
            message.add_query(question.clone());
            resolve(names, question, &mut message)
        }
        _ => ResponseCode::FormErr,
    };
    if query.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_BYTES_MAX);
        message.set_edns(edns);
    }
    let encoded = message.to_vec().ok()?;
    let limit = usize::from(query.max_payload().min(UDP_BYTES_MAX));
    if transport == Transport::Udp && encoded.len() > limit {
        return message.truncate().to_vec().ok();
    }
    Some(encoded)
}

/// Adds the records of a name, and returns the code.
fn resolve(names: &Names, question: &Query, message: &mut Message) -> ResponseCode {
    if question.query_class() != DNSClass::IN {
        return ResponseCode::Refused;
    }
    let name = question.name().to_lowercase().to_ascii();
    let addresses = match names.find(name.trim_end_matches('.')) {
        Known::Addresses(addresses) => addresses,
        Known::Absent => {
            message.metadata.authoritative = true;
            return ResponseCode::NXDomain;
        }
        Known::Foreign => return ResponseCode::Refused,
    };
    message.metadata.authoritative = true;
    let is_asked = |ip: &&IpAddr| match question.query_type() {
        RecordType::A => ip.is_ipv4(),
        RecordType::AAAA => ip.is_ipv6(),
        RecordType::ANY => true,
        _ => false,
    };
    for ip in addresses.iter().filter(is_asked) {
        let record = Record::from_rdata(question.name().clone(), TTL, (*ip).into());
        message.add_answer(record);
    }
    ResponseCode::NoError
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use hickory_resolver::proto::rr::Name;

    use super::super::names::tests::config;
    use super::*;

    fn ask(names: &Names, query: &Message, transport: Transport) -> Message {
        let bytes = answer(names, &query.to_vec().expect("a query"), transport);
        Message::from_vec(&bytes.expect("an answer")).expect("a message")
    }

    fn query(name: &str, kind: RecordType) -> Message {
        let mut query = Message::query();
        query.add_query(Query::query(Name::from_str(name).expect("a name"), kind));
        query
    }

    #[test]
    fn names_have_addresses_or_a_code_that_says_why_not() {
        let bindings = [("echo.global", "127.0.0.2:80"), ("six.global", "[::1]:80")];
        let names = Names::new(&config(&bindings, "240.0.0.0/4"));
        for (name, kind, code, addresses) in [
            ("echo.global.", RecordType::A, ResponseCode::NoError, 1),
            ("ECHO.Global.", RecordType::A, ResponseCode::NoError, 1),
            ("echo.global.", RecordType::AAAA, ResponseCode::NoError, 0),
            ("six.global.", RecordType::AAAA, ResponseCode::NoError, 1),
            ("echo.global.", RecordType::TXT, ResponseCode::NoError, 0),
            ("nothing.global.", RecordType::A, ResponseCode::NXDomain, 0),
            ("example.com.", RecordType::A, ResponseCode::Refused, 0),
            (".", RecordType::NS, ResponseCode::Refused, 0),
        ] {
            let query = query(name, kind);
            let answer = ask(&names, &query, Transport::Udp);
            assert_eq!(answer.metadata.response_code, code, "{name}");
            assert_eq!(answer.answers.len(), addresses, "{name}");
            assert_eq!(answer.metadata.id, query.metadata.id);
            assert_eq!(answer.queries, query.queries);
            let is_own = code != ResponseCode::Refused;
            assert_eq!(answer.metadata.authoritative, is_own, "{name}");
        }
    }

    #[test]
    fn an_answer_that_is_too_long_for_udp_is_truncated() {
        let addresses: Vec<_> = (1..=60).map(|last| format!("127.0.0.{last}:80")).collect();
        let bindings: Vec<_> = addresses
            .iter()
            .map(|one| ("echo.global", &**one))
            .collect();
        let names = Names::new(&config(&bindings, "240.0.0.0/4"));
        let mut query = query("echo.global.", RecordType::A);
        let short = ask(&names, &query, Transport::Udp);
        assert!(short.metadata.truncation && short.answers.is_empty());
        let whole = ask(&names, &query, Transport::Tcp);
        assert!(!whole.metadata.truncation);
        assert_eq!(whole.answers.len(), 60);
        let mut edns = Edns::new();
        edns.set_max_payload(4096);
        query.set_edns(edns);
        let long = ask(&names, &query, Transport::Udp);
        assert_eq!(
            (long.answers.len(), long.max_payload()),
            (60, UDP_BYTES_MAX)
        );
    }

    #[test]
    fn what_is_no_query_gets_no_answer_and_a_broken_one_a_format_error() {
        let names = Names::default();
        let reply = Message::response(7, OpCode::Query).to_vec().expect("bytes");
        assert_eq!(answer(&names, &reply, Transport::Udp), None);
        for short in 0..HEADER_BYTES {
            assert_eq!(answer(&names, &vec![0; short], Transport::Udp), None);
        }
        let mut broken = query("echo.global.", RecordType::A)
            .to_vec()
            .expect("bytes");
        broken.truncate(HEADER_BYTES + 3);
        let bytes = answer(&names, &broken, Transport::Udp).expect("an answer");
        let message = Message::from_vec(&bytes).expect("a message");
        assert_eq!(message.metadata.response_code, ResponseCode::FormErr);
        let none = ask(&names, &Message::query(), Transport::Udp);
        assert_eq!(none.metadata.response_code, ResponseCode::FormErr);
        let mut update = query("echo.global.", RecordType::A);
        update.metadata.op_code = OpCode::Notify;
        let refused = ask(&names, &update, Transport::Udp);
        assert_eq!(refused.metadata.response_code, ResponseCode::NotImp);
    }
}

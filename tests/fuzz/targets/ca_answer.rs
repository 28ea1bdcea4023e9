//! Answers of a certificate authority.

use std::sync::LazyLock;
use std::time::SystemTime;

use prost::Message;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use strait::grpc::auth::IstioCertificateResponse;
use strait::tls::issue::istio::check_answer;
use strait::tls::{TrustedDomain, endpoint_server_config};
use strait::tools::dev;

const ID: &str = "spiffe://east.local/ns/istio-system/sa/eastwest";

/// Valid answer: the leaf, the intermediate and the root; and the leaf's key.
static GOOD: LazyLock<([String; 3], PrivateKeyDer<'static>)> = LazyLock::new(|| {
    let authority = dev::Authority::new().expect("a root");
    let issuer = authority.intermediate("east").expect("an intermediate");
    let leaf = issuer.leaf(ID).expect("a leaf");
    let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes()).expect("a key");
    let second = leaf.chain_pem.rfind("-----BEGIN").expect("two certificates");
    let (first, second) = leaf.chain_pem.split_at(second);
    ([first.into(), second.into(), authority.root_pem()], key)
});

/// Reads the mode from the first byte: 0 for a message, 1 for steps that make an answer from the
/// parts of a valid one. An accepted answer is for our key and identity and can be served. A
/// rejected one has a reason of one line for the log.
pub fn ca_answer(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else {
        return;
    };
    let (good, key) = &*GOOD;
    let answer = match mode % 2 {
        0 => IstioCertificateResponse::decode(rest).map(|answer| answer.cert_chain),
        _ => Ok(made(rest)),
    };
    let Ok(answer) = answer else {
        return;
    };
    match check_answer(&answer, key.clone_key(), ID, SystemTime::now()) {
        Ok(material) => {
            assert_eq!(&*material.identity.uri, ID);
            assert!((1..=16).contains(&material.chain.len()));
            assert!((1..=1024).contains(&material.root_certificates.len()));
            let domain = TrustedDomain { name: "west.local".into(), issuers: None, roots: None };
            assert!(endpoint_server_config(&material, vec![domain]).is_ok());
        }
        Err(why) => {
            let why = why.to_string();
            assert!(!why.is_empty() && why.len() < 4096, "{why}");
            assert_ne!(answer, *good, "{why}");
        }
    }
}

/// Applies steps of three bytes each: action, place, and value.
fn made(steps: &[u8]) -> Vec<String> {
    let mut answer: Vec<Vec<u8>> = Vec::new();
    for step in steps.chunks_exact(3) {
        let part = GOOD.0[usize::from(step[1]) % 3].as_bytes();
        let Some(last) = answer.last_mut().filter(|_| step[0] % 4 != 0) else {
            answer.push(part.to_vec());
            continue;
        };
        let place = usize::from(step[1]) * 8 + usize::from(step[2] >> 5);
        match step[0] % 4 {
            1 => last.extend_from_slice(part),
            2 => last.truncate(place),
            _ => {
                if let Some(byte) = last.get_mut(place) {
                    *byte = step[2] & 0x7f;
                }
            }
        }
    }
    let text = |part: Vec<u8>| String::from_utf8(part).unwrap_or_default();
    answer.into_iter().map(text).collect()
}

//! The config dump, as other tools read it.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::Value;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

use crate::support::{Gateway, Net, Settings, identities, run};

/// Adds a decimal digit to a number in base 256, least significant byte first.
fn add_digit(number: &mut Vec<u8>, digit: u8) {
    let mut carry = u32::from(digit - b'0');
    for byte in number.iter_mut() {
        carry += u32::from(*byte) * 10;
        *byte = carry.to_le_bytes()[0];
        carry >>= 8;
    }
    if carry > 0 {
        number.push(carry.to_le_bytes()[0]);
    }
}

/// Returns the big-endian bytes of a decimal number.
fn bytes_of_decimal(text: &str) -> Vec<u8> {
    let mut number = Vec::new();
    for digit in text.bytes() {
        assert!(digit.is_ascii_digit(), "not a decimal number: {text}");
        add_digit(&mut number, digit);
    }
    number.reverse();
    number
}

#[test]
fn serial_numbers_in_the_dump_are_decimal() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let (status, body) = gateway.http(15000, "GET", "/config_dump").await;
        assert_eq!(status, 200, "{body}");
        let dump: Value = serde_json::from_str(&body).expect("JSON");
        let shown = dump["certificates"][0]["certChain"].as_array();
        let shown = shown.expect("a chain").iter().map(|one| {
            let serial = one["serialNumber"].as_str().expect("a serial number");
            bytes_of_decimal(serial)
        });
        let chain = CertificateDer::pem_file_iter(gateway.file("gateway.crt"));
        let chain = chain.expect("a file").map(|one| one.expect("a certificate"));
        let want = chain.map(|der| {
            let (_, parsed) = X509Certificate::from_der(&der).expect("a certificate");
            let serial = parsed.raw_serial();
            serial.strip_prefix(&[0]).unwrap_or(serial).to_vec()
        });
        let want: Vec<_> = want.collect();
        assert_eq!(want.len(), 2, "a leaf and its intermediate");
        assert_eq!(shown.collect::<Vec<_>>(), want);
    });
}

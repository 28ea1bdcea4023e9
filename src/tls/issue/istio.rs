//! Client of Istio's certificate authority: `CreateCertificate` (docs/wire-contract.md 4.3).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{anyhow, bail};
use http::uri::PathAndQuery;
use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, SanType};
use rustls::pki_types::PrivateKeyDer;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Status;
use tonic::client::Grpc;
use tonic_prost::ProstCodec;
use tracing::warn;

use super::cache::Cache;
use super::rotation::run_renewal;
use super::{
    CertificateEvent, DEADLINE, RenewalSignals, material_from_answer, parse_certificates,
    require_identity, shortened,
};
use crate::config::ControlPlane;
use crate::grpc::auth::{IstioCertificateRequest, IstioCertificateResponse};
use crate::grpc::channel;
use crate::grpc::goaway::GoAwayCode;
use crate::tls::IdentityMaterial;

/// Limit of an answer, in bytes: a thousand roots of 1 KiB.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Method that signs a request for the identity of the caller.
const METHOD: &str = "/istio.v1.auth.IstioCertificateService/CreateCertificate";

/// Istio's certificate authority, and the certificate to request from it.
#[derive(Clone, Debug)]
pub struct IstioAuthority {
    /// Address and credentials of the authority.
    pub plane: ControlPlane,
    /// Name of the gateway's cluster at the authority.
    pub cluster: String,
    /// Identity to request: `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
    pub id: String,
    pub ttl: Duration,
    /// Directory for the key and chain, if any.
    pub cache: Option<Cache>,
    pub signals: RenewalSignals,
}

impl IstioAuthority {
    /// Requests and renews certificates, each with a new key, and reports every certificate and
    /// every failure. A certificate from disk serves until the first answer.
    pub async fn run(self, news: mpsc::Sender<CertificateEvent>) {
        let authority = Arc::new(self);
        let held = authority.restore().await;
        let fetch = || {
            let authority = Arc::clone(&authority);
            async move { authority.fetch().await.map(Arc::new) }
        };
        let keep = |material: &_| authority.store_on_disk(material);
        let renewal = run_renewal(held, fetch, keep, SystemTime::now, news, &authority.signals);
        match &authority.cache {
            Some(cache) => tokio::select! {
                () = renewal => {}
                () = cache.remove_expired() => {}
            },
            None => renewal.await,
        }
    }

    /// Returns the certificate on disk, if there is a valid one.
    async fn restore(&self) -> Option<Arc<IdentityMaterial>> {
        match self.cache.as_ref()?.load_in_time().await? {
            Ok(material) => material.map(Arc::new),
            Err(error) => {
                warn!(%error, "the certificate on disk is not used");
                None
            }
        }
    }

    /// Stores a certificate on disk, by another task: a slow disk delays nothing, and a failure
    /// matters only at the next restart.
    fn store_on_disk(&self, material: &Arc<IdentityMaterial>) {
        let Some(cache) = self.cache.clone() else {
            return;
        };
        let material = Arc::clone(material);
        tokio::spawn(async move {
            if let Some(Err(error)) = cache.on_disk(move |cache| cache.store(&material)).await {
                warn!(%error, "cannot store the certificate on disk");
            }
        });
    }

    /// Requests one certificate. Roots and token are read again, and the connection is closed
    /// afterwards, because the next request is hours away.
    async fn fetch(&self) -> anyhow::Result<IdentityMaterial> {
        let answer = timeout(DEADLINE, self.create_certificate()).await;
        answer
            .unwrap_or_else(|_| bail!("no answer within {DEADLINE:?}"))
            .map_err(|error| anyhow!("{}: {error}", self.plane.address))
    }

    async fn create_certificate(&self) -> anyhow::Result<IdentityMaterial> {
        let (key, csr) = signing_request(&self.id)
            .map_err(|error| anyhow!("cannot create a certificate request: {error}"))?;
        let channel = channel::connect(&self.plane, GoAwayCode::default()).await?;
        let mut service = Grpc::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
        let mut call = tonic::Request::new(IstioCertificateRequest {
            csr,
            validity_duration: i64::try_from(self.ttl.as_secs()).unwrap_or(i64::MAX),
            metadata: None,
        });
        channel::add_credentials(&self.plane, &self.cluster, &mut call).await?;
        let refused = |status: Status| {
            let (code, message) = (status.code(), shortened(status.message()));
            anyhow!("the authority refused the request: {code}: {message:?}")
        };
        let path = PathAndQuery::from_static(METHOD);
        let unready = |error| refused(Status::unknown(format!("Service was not ready: {error}")));
        service.ready().await.map_err(unready)?;
        let answer = service.unary(call, path, ProstCodec::default()).await.map_err(refused)?;
        let answer: IstioCertificateResponse = answer.into_inner();
        check_answer(&answer.cert_chain, key, &self.id, SystemTime::now())
    }
}

/// Creates a key, and a signing request for `id`: an empty subject and one URI SAN.
fn signing_request(id: &str) -> Result<(PrivateKeyDer<'static>, String), rcgen::Error> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(id.try_into()?)];
    let csr = params.serialize_request(&key)?.pem()?;
    Ok((PrivateKeyDer::Pkcs8(key.serialize_der().into()), csr))
}

/// Checks an authority's answer: the leaf, its intermediates and, last, the roots. Each part is
/// PEM with one or more certificates.
///
/// # Errors
/// The answer is incomplete, too large, for another key or identity, or not valid now.
pub fn check_answer(
    answer: &[String],
    key: PrivateKeyDer<'static>,
    id: &str,
    now: SystemTime,
) -> anyhow::Result<IdentityMaterial> {
    let (Some((roots, chain)), 2..) = (answer.split_last(), answer.len()) else {
        let count = answer.len();
        bail!("the answer has {count} parts; it needs a certificate and, last, the roots");
    };
    let chain: anyhow::Result<Vec<_>> = chain.iter().map(|part| parse_certificates(part)).collect();
    let material = material_from_answer(chain?.concat(), key, parse_certificates(roots)?, now)?;
    require_identity(&material, id)?;
    Ok(material)
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509CertificationRequest};

    use super::*;
    use crate::tools::dev::{Authority as Root, Issuer};

    const ID: &str = "spiffe://east.local/ns/istio-system/sa/eastwest";
    const OTHER: &str = "spiffe://east.local/ns/istio-system/sa/default";

    struct Fixture {
        root: String,
        issuer: Issuer,
        key: PrivateKeyDer<'static>,
        csr: String,
    }

    fn fixture() -> Fixture {
        let root = Root::new().unwrap();
        let (key, csr) = signing_request(ID).unwrap();
        Fixture { root: root.root_pem(), issuer: root.intermediate("east").unwrap(), key, csr }
    }

    impl Fixture {
        fn signed(&self, change: impl FnOnce(&mut CertificateParams)) -> Vec<String> {
            self.signed_for(ID, change)
        }

        fn signed_for(&self, id: &str, change: impl FnOnce(&mut CertificateParams)) -> Vec<String> {
            let signed = self.issuer.sign(&self.csr, |params| {
                params.subject_alt_names = vec![SanType::URI(id.try_into().unwrap())];
                change(params);
            });
            [&signed.unwrap()[..], std::slice::from_ref(&self.root)].concat()
        }

        fn accept(&self, answer: &[String]) -> Result<IdentityMaterial, String> {
            let key = self.key.clone_key();
            check_answer(answer, key, ID, SystemTime::now()).map_err(|error| error.to_string())
        }
    }

    #[test]
    fn a_request_has_no_subject_and_one_uri() {
        let (_, csr) = signing_request(ID).unwrap();
        let der = pem::parse(&csr).unwrap();
        assert_eq!(der.tag(), "CERTIFICATE REQUEST");
        let (rest, csr) = X509CertificationRequest::from_der(der.contents()).unwrap();
        assert!(rest.is_empty());
        assert_eq!(csr.certification_request_info.subject.iter().count(), 0);
        let names: Vec<_> = csr
            .requested_extensions()
            .unwrap()
            .filter_map(|extension| match extension {
                ParsedExtension::SubjectAlternativeName(names) => Some(&names.general_names),
                _ => None,
            })
            .flatten()
            .collect();
        assert_eq!(names, [&GeneralName::URI(ID)]);
    }

    #[test]
    fn an_answer_is_the_leaf_its_intermediates_and_last_the_roots() {
        let fixture = fixture();
        let mut answer = fixture.signed(|_| {});
        let other = Root::new().unwrap().root_pem();
        answer[2] += &other;
        for answer in [answer.clone(), vec![answer[..2].concat(), answer[2].clone()]] {
            let material = fixture.accept(&answer).unwrap();
            assert_eq!((material.chain.len(), material.roots.len()), (2, 2));
            assert_eq!(&*material.identity.uri, ID);
            let kinds: Vec<_> = material.expiries().iter().map(|(kind, _)| *kind).collect();
            assert_eq!(kinds, ["leaf", "intermediate", "root"]);
        }
    }

    #[test]
    fn an_answer_that_is_of_no_use_says_why() {
        let fixture = fixture();
        let good = fixture.signed(|_| {});
        let other_key = Fixture { csr: signing_request(ID).unwrap().1, ..self::fixture() };
        let day = time::Duration::DAY;
        let part = |index: usize| good[index].clone();
        let many = vec![part(0), part(1).repeat(CHAIN_MAX_TEST), part(2)];
        let cases = [
            (vec![], "the answer has 0 parts"),
            (vec![part(0)], "the answer has 1 parts"),
            (vec![part(0), String::new()], "the answer's roots: contains no certificate"),
            (vec![String::new(), part(2)], "the answer: contains no certificate"),
            (vec![part(0), "-----BEGIN CERTIFICATE-----\n".into()], "cannot be read as PEM"),
            (vec![part(1), part(2)], "not a workload certificate (ca_as_leaf)"),
            (many, "more than 16 certificates in its chain"),
            (vec![part(0), part(2).repeat(1025)], "more than 1024 certificates in its roots"),
            (fixture.signed_for(OTHER, |_| {}), OTHER),
            (fixture.signed_for("https://a/b", |_| {}), "(bad_spiffe_id)"),
            (other_key.signed(|_| {}), "does not match the certificate"),
            (fixture.signed(|params| params.not_before += day), "is not valid before"),
            (fixture.signed(|params| params.not_after = params.not_before), "expired at"),
        ];
        for (answer, why) in cases {
            let refused = fixture.accept(&answer).expect_err(why);
            assert!(refused.contains(why), "{refused}");
        }
    }

    /// One more than the limit, together with the leaf.
    const CHAIN_MAX_TEST: usize = super::super::CHAIN_MAX;
}

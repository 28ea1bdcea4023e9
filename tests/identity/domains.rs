//! Separate roots of a trust domain.

use crate::cases::ADMITTED;
use crate::der::URI;
use crate::pki::{Authority, Pki};
use crate::support::{replace, run, until};
use crate::table::Bench;

const PARTNER: &str = "spiffe://partner.example/ns/shop/sa/checkout";
const SHARED: &str = "spiffe://west.local/ns/shop/sa/checkout";

#[test]
fn a_domain_with_its_own_roots_is_judged_by_them_and_no_other_domain_is() {
    run(async {
        let pki = Pki::new();
        let own = Authority::root("root of the partner", |_| ());
        let mut bench = Bench::start(&pki.trusted()).await;
        let below = own.below("partner");
        let named = |issuer: &Authority, id: &str| issuer.named(&[(URI, id.as_bytes())]);
        let cases = [
            ("the partner by its own root", ADMITTED, named(&below, PARTNER)),
            ("the partner by the shared root", "unknown_issuer", named(&pki.west, PARTNER)),
            ("another domain by the partner's root", "unknown_issuer", named(&below, SHARED)),
            ("another domain by the shared root", ADMITTED, named(&pki.west, SHARED)),
        ];
        let [(_, _, partner), ..] = &cases;
        let seen = bench.connect_with(partner).await;
        assert_eq!(seen.as_deref(), Ok("untrusted_domain"), "before");

        std::fs::write(bench.gateway.file("partner.crt"), own.pem()).expect("a file");
        let config = bench.gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&config).expect("a file");
        let west = "    - {name: west.local, cluster: west}\n";
        let both =
            format!("{west}    - {{name: partner.example, cluster: west, roots: partner.crt}}\n");
        assert!(text.contains(west), "{text}");
        replace(&config, &text.replace(west, &both));
        let reloads = "strait_reload_total{what=\"config\",result=\"ok\"}";
        let reloaded = async || bench.gateway.metric(reloads).await;
        until("the reload", reloaded, |&count| count == 1.0).await;
        for (name, expected, shown) in &cases {
            assert_eq!(bench.connect_with(shown).await.as_deref(), Ok(*expected), "{name}");
        }
    });
}
